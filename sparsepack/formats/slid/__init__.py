"""The slid folder: a pruned model for 2:4 tensor cores."""
