"""Loops of models that generate no text: jobs take turns, one piece of work after another."""
