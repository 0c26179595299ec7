"""What a part of a document is, and so each segment of a row: `segment_roles`, int32 [B, S], of its segment s + 1."""

ABSENT = 0
# The two sides of a preference.
CHOSEN, REJECTED = 1, 2
# A completion that was judged by itself, for KTO; and a prompt with another one's completion, of which it estimates a
# mean.
DESIRABLE, UNDESIRABLE, MISMATCHED = 3, 4, 5
# One that was sampled and rewarded; it has an entry in `advantages`.
COMPLETION = 6
# Texts that are embedded: a query, one that answers it, one that does not though it is near (a hard negative).
QUERY, POSITIVE, NEGATIVE = 7, 8, 9
EMBEDDED = (QUERY, POSITIVE, NEGATIVE)

# For people.
NAMES = {CHOSEN: "chosen", REJECTED: "rejected", DESIRABLE: "desirable", UNDESIRABLE: "not desirable",
         MISMATCHED: "mismatched, for the estimate", QUERY: "query", POSITIVE: "positive", NEGATIVE: "negative"}
