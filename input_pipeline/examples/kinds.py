"""What can be learned from. The trainer tells which of KINDS its strategy does, as `learns`."""

# mismatched: labelled, each with the completion of another prompt.
KINDS = ("texts", "conversations", "pairs", "labelled", "mismatched", "rollouts")
# Those whose documents have parts, which are kept whole.
WITH_PARTS = ("pairs", "labelled", "mismatched", "rollouts")
# Those whose parts have advantages, which are in a batch's `advantages`.
WITH_ADVANTAGES = ("rollouts",)
