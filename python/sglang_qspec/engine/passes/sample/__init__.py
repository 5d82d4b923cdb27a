"""The target's tokens at the nodes of trees, and the acceptance of draft tokens."""
