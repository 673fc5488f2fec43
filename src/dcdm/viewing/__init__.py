"""What people look at, in terminals and pages.

Parts: palette, page, tables, plots. What they show: chunks (with terminal), evaluation_report, demo_report.
"""
