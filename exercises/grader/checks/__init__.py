"""What is asked in each assignment, and how it is judged: one module a step."""
