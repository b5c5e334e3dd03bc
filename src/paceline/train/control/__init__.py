"""Connections among the ranks apart from the training: failures, stops, exits."""
