"""Prompts that no draft head was trained on: chat, code, lists and stories, for exactness and for speed."""

from __future__ import annotations

CHAT = (
    "Why do cats purr?",
    "What should I look at before I rent a flat in a foreign city?",
    "Explain to a child why the sky turns red in the evening.",
    "I have slept badly for a week. What could I change?",
    "How does a lighthouse keep its lamp turning?",
    "Which is better for a beginner, the cello or the trumpet?",
    "My neighbour plays the drums at night. Write me a polite note to him.",
    "What is the difference between a comet and a meteor?",
    "Can you tell me how vaccines are tested before they are sold?",
    "Summarise in three sentences what the Silk Road was.",
    "Is it safe to eat mushrooms that I find in a park?",
    "How would you explain compound interest to a teenager?",
)
CODE = (
    "Write a Python function that tells whether a year is a leap year.",
    "How do I reverse a linked list in C?",
    "Write a SQL query that finds the ten customers who spent most in 2023.",
    "Explain what this does: `x = [i * i for i in range(10) if i % 2]`",
    "Write a bash script that renames all .jpeg files to .jpg.",
    "What is the difference between == and === in JavaScript? Show examples.",
    "Write a Python class for a bank account with deposit and withdraw methods.",
    "Give me a regular expression for dates such as 2024-02-29 and explain it.",
    "Write a unit test with pytest for a function that adds two numbers.",
    "How can I read a CSV file in Python and print the sum of one column?",
    "Write an HTML page with a form that asks for a name and an e-mail address.",
    "Write a recursive function in Python that computes the greatest common divisor.",
)
LISTS = (
    "List ten things to pack for a week of camping in the rain.",
    "Give me a numbered list of the planets with one fact each.",
    "Make a shopping list for a vegetarian dinner for six people.",
    "List the steps to change a bicycle tyre.",
    "Give me eight ideas for a birthday party in a library.",
    "List five advantages and five disadvantages of working from home.",
    "Name seven famous rivers and the countries they flow through.",
    "Write a checklist for closing a small restaurant at night.",
    "List six exercises that need no equipment.",
    "Give me a table of four musical instruments with their families and materials.",
    "List the main parts of a sailing boat and what each is for.",
    "Write ten rules for a chess club of beginners.",
)
STORIES = (
    "Tell me a story about a clock that was afraid of midnight.",
    "Write a short story about two sisters who find a map in an attic.",
    "Write a tale in which a baker outwits a dragon.",
    "Tell me a bedtime story about a hedgehog who wanted to fly.",
    "Write the beginning of a mystery that starts on a night train.",
    "Write a story about the last librarian on Mars.",
    "Tell a story about a fisherman who catches a letter instead of a fish.",
    "Write a fable about patience with a snail and a kite.",
    "Write a story about a lighthouse keeper who collects echoes.",
    "Tell me about a village where it rained music.",
    "Write a story of a girl who trades shadows at the market.",
    "Write a scene in which an old actor meets his younger self.",
)
GROUPS = {"chat": CHAT, "code": CODE, "lists": LISTS, "stories": STORIES}
ALL = tuple(prompt for group in zip(*GROUPS.values(), strict=True) for prompt in group)
"""One of each group after the other: any eight in a row are two of each."""
