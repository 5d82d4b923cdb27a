"""Twelve prompts of our own, of mixed kinds and lengths, for the demo and the tests."""

PROMPTS = (
    "Explain in simple words why the sky is blue during the day and red at sunset.",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "List five ways to save water at home, with one sentence for each.",
    "What is the difference between a list and a tuple in Python? Give a small example.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. Each loaf costs "
    "3 euros. How much money does the baker earn in a day? Show the steps.",
    "Summarize the following text in two sentences: The first bicycles had no pedals. Riders "
    "pushed themselves along with their feet on the ground, and steered with a simple bar. Decades "
    "later, pedals were fixed to the front wheel, and soon after a chain drove the rear wheel, "
    "which made cycling faster, safer and more comfortable for everyone.",
    "Write a polite email to a neighbour who plays loud music late at night.",
    "Translate into French: The train to the mountains leaves at nine, and the children are ready.",
    "Give me a recipe for a simple vegetable soup, with the ingredients first.",
    "Who was Marie Curie, and what is she known for?",
    "Write a Python function that returns the largest number in a list, and explain each line.",
    "Plan a weekend trip to a small town by the sea for a family with two children.",
)
