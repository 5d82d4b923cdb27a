"""`qspec show`: a page that shows where each token of an answer comes from."""
