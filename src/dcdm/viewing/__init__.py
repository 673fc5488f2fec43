"""What people look at, in terminals and pages.

Parts: palette, page, tables, plots. What they show: chunks (with terminal), report, demo_report.
"""
