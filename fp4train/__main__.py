"""`python -m fp4train` is `fp4train`."""

from fp4train.cli import main

if __name__ == "__main__":
    main()
