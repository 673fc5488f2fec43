"""The paper's tables and figures as experiments: at CPU scale they run, at the paper's they are spelled out."""
