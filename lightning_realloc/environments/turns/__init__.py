"""Turns as messages and as tokens: `ChatTurns` makes tokens of messages, `TurnParser` a message of the text.

`TurnParts` finds which tokens are thoughts, calls of tools and answer.
"""
