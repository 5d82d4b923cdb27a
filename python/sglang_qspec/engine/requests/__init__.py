"""The state of live requests, and the settings that an operator changes while the server runs."""
