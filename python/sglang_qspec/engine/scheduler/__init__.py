"""Hooks in SGLang's scheduler, except for the target passes."""
