// Command pooled sends lock statements in every way that database/sql has, for
// a test that builds it in several ways. It prints, for each, the line where
// the driver saw the call, or nothing where it let it pass.
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/pprof"

	"github.com/pgadvlock/pgadvlock"
)

const (
	lock   = "SELECT pg_advisory_lock(42)"
	unlock = "SELECT pg_advisory_unlock(42)"
	try    = "SELECT pg_try_advisory_lock($1)"
)

var ctx = context.Background()

func main() {
	slog.SetDefault(slog.New(slog.DiscardHandler))
	db, err := sql.Open("pgadvlock", os.Args[1])
	check(err)
	defer db.Close()
	if len(os.Args) > 2 {
		profile(db, os.Args[2])
		return
	}
	pool(db)
	conn, err := db.Conn(ctx)
	check(err)
	dedicated(conn)
	check(conn.Close())
	tx, err := db.Begin()
	check(err)
	transaction(tx)
	check(tx.Rollback())
	prepared(db)
	store{db}.lock()
	func() {
		defer store{db}.lock()
	}()
	deep(30, func() { store{db}.lock() })
	done := make(chan bool)
	go func() {
		show(exec(db.Exec(lock))) // refused
		close(done)
	}()
	<-done
}

// pool does what must be refused.
func pool(db *sql.DB) {
	show(exec(db.Exec(lock)))                               // refused
	show(exec(db.ExecContext(ctx, lock)))                   // refused
	show(query(db.Query(unlock)))                           // refused
	show(query(db.QueryContext(ctx, try, 42)))              // refused
	show(row(db.QueryRow(try, 42)))                         // refused
	show(row(db.QueryRowContext(ctx, unlock)))              // refused
	show(exec(db.Exec(lock + "; " + unlock)))               // one text that gives back what it takes
	show(exec(db.Exec("SELECT 'pg_advisory_lock'")))        // no call
	show(exec(db.Exec("SELECT pg_advisory_xact_lock(42)"))) // not for the session
}

// dedicated, transaction and prepared are right, or not certain to be wrong.
func dedicated(conn *sql.Conn) {
	show(exec(conn.ExecContext(ctx, lock)))
	show(query(conn.QueryContext(ctx, try, 42)))
	show(row(conn.QueryRowContext(ctx, unlock)))
}

func transaction(tx *sql.Tx) {
	show(exec(tx.Exec(lock)))
	show(query(tx.Query(try, 42)))
	show(row(tx.QueryRow(unlock)))
}

func prepared(db *sql.DB) {
	stmt, err := db.Prepare(unlock)
	check(err)
	defer stmt.Close()
	show(exec(stmt.Exec()))
	show(row(stmt.QueryRow()))
}

// store is how programs have it: a type of their own in between.
type store struct{ db *sql.DB }

func (s store) lock() { show(s.run(lock)) }

func (s store) run(query string) error { _, err := s.db.ExecContext(ctx, query); return err } // refused three times

func deep(n int, f func()) {
	if n == 0 {
		f()
		return
	}
	deep(n-1, f)
}

func exec(_ sql.Result, err error) error { return err }

func query(rows *sql.Rows, err error) error {
	if err == nil {
		err = rows.Close()
	}
	return err
}

func row(r *sql.Row) error {
	var v any
	return r.Scan(&v)
}

func show(err error) {
	var refused *pgadvlock.RuleError
	switch {
	case err == nil:
		fmt.Println()
	case errors.As(err, &refused) && errors.Is(err, pgadvlock.RulePooledSessionLock):
		fmt.Println(refused.Event.Caller)
	default:
		fmt.Println("failed:", err)
	}
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// profile spends its time where -pgo should then inline. cpu.pprof was made of
// its profile: -pgo looks only at the two innermost frames of a sample, so each
// sample was split into all the calls on its stack, and the names of files were
// taken out.
func profile(db *sql.DB, file string) {
	f, err := os.Create(file)
	check(err)
	check(pprof.StartCPUProfile(f))
	for range 200000 {
		_ = store{db}.run(lock)
		_ = row(db.QueryRow(try, 42))
	}
	pprof.StopCPUProfile()
	check(f.Close())
}
