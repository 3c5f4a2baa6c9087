"""Comparing two receipts, whoever wrote them: the first difference, near ties, a verdict, a report."""
