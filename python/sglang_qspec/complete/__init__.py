"""`qspec complete`: ask a server for a completion, and see which of its tokens were drafted."""
