"""Prompts of token ids, for `serving` and its tests."""

PROMPTS = [[(7 * row + 3 * place) % 200 for place in range(9 + row)] for row in range(5)]
