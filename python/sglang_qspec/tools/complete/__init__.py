"""`qspec complete`: requests a completion and shows which of its tokens were drafted."""
