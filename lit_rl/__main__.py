"""``python -m lit_rl`` is ``lit-rl``; classes defined here would break ``class_path``."""

from lit_rl.cli import main

if __name__ == "__main__":
    main()
