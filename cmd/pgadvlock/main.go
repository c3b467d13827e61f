// Command pgadvlock shows what the pgadvlock driver does.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
)

const usage = `usage: pgadvlock <command>

  demo    start PostgreSQL and PgBouncer in a temporary directory and show,
          side by side, what becomes of advisory locks on pgx and on pgadvlock
  help    this text
`

func main() {
	command := "help"
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	switch command {
	case "demo":
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
		err := demo(ctx, os.Stdout)
		stop()
		if err != nil {
			fmt.Fprintln(os.Stderr, "pgadvlock demo:", err)
			os.Exit(1)
		}
	case "help", "-h", "-help", "--help":
		fmt.Print(usage)
	default:
		fmt.Fprintf(os.Stderr, "pgadvlock: no command %q\n\n%s", command, usage)
		os.Exit(2)
	}
}
