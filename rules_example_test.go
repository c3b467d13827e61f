package pgadvlock_test

// The right code of docs/rules.md: it compiles, and TestRulesDoc checks that
// it is the code printed there.

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/pgadvlock/pgadvlock"
)

func Example_sessionLock() {
	_ = func(ctx context.Context, db *sql.DB, refund func(context.Context) error) error {
		conn, err := db.Conn(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		if _, err := conn.ExecContext(ctx, "SELECT pg_advisory_lock(42)"); err != nil {
			return err
		}
		defer conn.ExecContext(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock(42)")
		return refund(ctx)
	}
}

func Example_transactionLock() {
	_ = func(ctx context.Context, db *sql.DB, refundIn func(context.Context, *sql.Tx) error) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(42)"); err != nil {
			return err
		}
		if err := refundIn(ctx, tx); err != nil {
			return err
		}
		return tx.Commit()
	}
}

func Example_readCommitted() {
	_ = func(ctx context.Context, db *sql.DB) error {
		tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(42)"); err != nil {
			return err
		}
		return tx.Commit()
	}
}

func Example_lockChosenRows() {
	_ = func(ctx context.Context, conn *sql.Conn) error {
		rows, err := conn.QueryContext(pgadvlock.Allow(ctx, pgadvlock.RuleLockPerRow),
			"SELECT id, pg_try_advisory_lock(7, id) FROM (SELECT id FROM items WHERE id % 5 = 0 ORDER BY id LIMIT 2 OFFSET 0) AS chosen")
		if err != nil {
			return err
		}
		return rows.Close()
	}
}

func Example_oneOrder() {
	_ = func(ctx context.Context, tx *sql.Tx, from, to int64) error {
		if to < from {
			from, to = to, from
		}
		for _, key := range []int64{from, to} {
			if _, err := tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock($1)", key); err != nil {
				return err
			}
		}
		return nil
	}
}

func Example_wideKey() {
	_ = func(ctx context.Context, tx *sql.Tx) error {
		var err error
		_, err = tx.ExecContext(ctx, "SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", "refunds")
		return err
	}
}

func ExampleAllow() {
	ctx := context.Background()
	ctx = pgadvlock.Allow(ctx, pgadvlock.RuleXactLockAutocommit)
	_ = ctx // db.ExecContext(ctx, "SELECT pg_advisory_xact_lock(42)") only wants to wait
}

// A handler must not block and must not use the database. To do more, it sends
// to a buffered channel, and counts what does not fit.
func ExampleWithEventHandler() {
	events := make(chan pgadvlock.Event, 100)
	lost := 0
	connector, err := pgadvlock.NewConnector("host=localhost",
		pgadvlock.WithEventHandler(func(_ context.Context, e pgadvlock.Event) {
			select {
			case events <- e:
			default:
				lost++ // with an atomic counter in a program with several connections
			}
		}))
	if err != nil {
		fmt.Println(err)
		return
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	go func() {
		for e := range events {
			fmt.Println(e.Rule, e.Locks, e.Caller) // a ticket, a metric, a message
		}
	}()
	close(events)
}

func ExampleConnector_SetPreset() {
	connector, err := pgadvlock.NewConnector("host=localhost", pgadvlock.WithPreset(pgadvlock.PresetObserve))
	if err != nil {
		fmt.Println(err)
		return
	}
	// Later, while it runs: refuse from now on, but let one rule pass.
	connector.SetPreset(pgadvlock.PresetEnforce)
	connector.SetRule(pgadvlock.RulePooledSessionLock, pgadvlock.LevelWarn)
	// Output:
}

func ExampleNewConnector() {
	_, err := pgadvlock.NewConnector("host=localhost password=secret pgadvlock_reset=drop")
	fmt.Println(err)
	// Output: pgadvlock: DSN parameter pgadvlock_reset: invalid value "drop"; valid: unlock_all, discard_all, close, off
}
