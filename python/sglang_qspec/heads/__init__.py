"""Draft heads: small networks that draft from the hidden states of a target (EAGLE-3)."""
