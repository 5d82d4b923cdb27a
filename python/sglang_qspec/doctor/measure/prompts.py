"""The prompts on which `qspec doctor --measure` compares the two models."""

PROMPTS = (
    "Explain in three sentences why the sea is salty.",
    "Write a Python function that counts the vowels in a string.",
    "List four ways to reduce noise in an office, with one sentence for each.",
    "A train travels 180 km in two hours. How far does it travel in 45 minutes? Show the steps.",
    "Summarize in one sentence: The library opens at nine. On Mondays it stays closed, because the "
    "staff sorts the returned books and repairs the damaged ones.",
    "Write a short letter that asks a landlord to repair a broken window.",
)
