"""The live requests of a scheduler: what they ask for, and their drafts."""
