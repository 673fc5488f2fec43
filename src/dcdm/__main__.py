from dcdm.cli import main

main()
