"""What can be learned from. The trainer tells which of KINDS its strategy does, as `learns`."""

# taught: tokens, each with what a teacher expected there; routed: conversations, each with the name of its teacher;
# graded: pairs, each with its margin; mismatched: labelled, each with the completion of another prompt; matches:
# queries with texts that answer them.
KINDS = ("texts", "conversations", "taught", "routed", "pairs", "graded", "labelled", "mismatched", "rollouts",
         "matches")
# Those whose documents have parts, which are kept whole.
WITH_PARTS = ("pairs", "graded", "labelled", "mismatched", "rollouts", "matches")
# Those whose parts have a number each, which is in a batch's `advantages`: a completion's advantage, or by how much the
# chosen side of a pair is to be better, its margin.
WITH_ADVANTAGES = ("rollouts", "graded")
