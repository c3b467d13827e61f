package pgadvlock_test

// What a program passes as an argument, or writes as a string, is nobody
// else's business: it appears in no event, log line or error of ours.

import (
	"bytes"
	"database/sql"
	"fmt"
	"log/slog"
	"strings"
	"testing"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

const canary = "cAnArY"

// told runs statements that offend every rule, with the canary as argument and
// in literals, and returns all that was said about it.
func told(t *testing.T, opts ...pgadvlock.Option) string {
	t.Helper()
	server := pgtest.Shared(t)
	server.RequireBouncer(t)
	name := server.NewDB(t)
	must(t, server.Exec(name, "CREATE TABLE items (id int)"))
	must(t, server.Exec(name, "ALTER DATABASE "+name+" SET lock_timeout = '10ms'")) // the statements stand in each other's way
	var log bytes.Buffer
	for _, dsn := range []string{server.DSN(name), server.BouncerDSN(name, "transaction") + simple} {
		for _, level := range []pgadvlock.Level{pgadvlock.LevelWarn, pgadvlock.LevelError} {
			rec := &recorder{}
			opts := append([]pgadvlock.Option{pgadvlock.WithLogger(slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))),
				pgadvlock.WithRule(pgadvlock.RuleWeakKey, level)}, opts...)
			for _, w := range wrongs {
				opts = append(opts, pgadvlock.WithRule(w.rule, level))
			}
			db := openDB(t, dsn, rec, opts...)
			conn := mustConn(t, db)
			for _, s := range []struct {
				query string
				args  []any
			}{
				{"SELECT pg_advisory_lock(hashtext($1))", []any{canary}},
				{"SELECT pg_advisory_lock(hashtextextended($1, 0))", []any{canary}},
				{"SELECT pg_advisory_lock(1, hashtext('" + canary + "'))", nil},
				{"SELECT pg_advisory_lock(hashtextextended($tag$" + canary + "$tag$ || E'" + canary + "', 0))", nil},
				{"SELECT pg_advisory_unlock(hashtextextended($1, 1))", []any{canary}},
				{"SELECT pg_advisory_unlock($1)", []any{canary}},
				{"SELECT pg_advisory_xact_lock(hashtextextended($1, 2))", []any{canary}},
				{"SELECT pg_advisory_lock(hashtext($1)) FROM items WHERE '" + canary + "' = $1 LIMIT 1", []any{canary}},
				{"DO $$ BEGIN PERFORM pg_advisory_lock(hashtext('" + canary + "')); END $$", nil},
				{"PREPARE " + canary + " AS SELECT pg_advisory_lock(hashtext('" + canary + "'))", nil},
			} {
				for _, x := range []execer{conn, db} {
					_, err := x.ExecContext(ctxFor(t), s.query, s.args...)
					if sqlState(err) == "" { // PostgreSQL's own words are the caller's, as on pgx
						fmt.Fprintln(&log, "error:", err)
					}
				}
			}
			must(t, conn.Close())
			c, _ := pgadvlock.ConnectorOf(db)
			fmt.Fprintf(&log, "%v\n%+v\n%#v\n%+v\n", rec.all(), rec.all(), rec.all(), c.Sessions())
		}
	}
	return log.String()
}

func TestArgumentsAreNotTold(t *testing.T) {
	if said := told(t); strings.Contains(said, canary) {
		i := strings.Index(said, canary)
		t.Errorf("told: …%s…", said[max(0, i-200):min(len(said), i+200)])
	}
	// The search would find it: when told to show arguments, the driver does.
	if said := told(t, pgadvlock.WithKeyArguments(true)); !strings.Contains(said, canary) {
		t.Error("the control found nothing")
	}
}

// A password in a DSN is in no error, whichever part of it is wrong.
func TestPasswordsAreNotTold(t *testing.T) {
	for _, dsn := range []string{
		"postgres://u:" + canary + "@127.0.0.1:1/db",
		"host=127.0.0.1 port=1 user=u password=" + canary,
		"host=127.0.0.1 port=x password=" + canary,
		"postgres://u:" + canary + "@127.0.0.1:1/db?pgadvlock_reset=x",
		"password=" + canary + " pgadvlock_reset='",
	} {
		db, err := sql.Open("pgadvlock", dsn)
		if err == nil {
			err = db.PingContext(ctxFor(t))
			db.Close()
		}
		if err == nil || strings.Contains(err.Error(), canary) {
			t.Errorf("%v", err)
		}
	}
}
