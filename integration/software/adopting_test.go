package software

// The steps of docs/adopting.md, in the code that it shows.

import (
	"database/sql"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	"github.com/lib/pq"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/pgadvlock/pgadvlock"
)

// First in observe: the program does what it did before, and what is wrong is
// reported, with its line. Then in enforce: it is refused.
func TestObserveFirstThenEnforce(t *testing.T) {
	// wrong is what the libraries make easy: a lock on the pool itself.
	for library, open := range map[string]func(*testing.T, string) (*sql.DB, func(string) error){
		"database/sql": func(t *testing.T, dsn string) (*sql.DB, func(string) error) {
			db, err := sql.Open("pgadvlock", dsn)
			must(t, err)
			return db, func(query string) error { _, err := db.Exec(query); return err }
		},
		"sqlx": func(t *testing.T, dsn string) (*sql.DB, func(string) error) {
			db, err := sqlx.Connect("pgadvlock", dsn)
			must(t, err)
			return db.DB, func(query string) error { _, err := db.Exec(query); return err }
		},
		"GORM": func(t *testing.T, dsn string) (*sql.DB, func(string) error) {
			db := openGORM(t, dsn, false)
			pool, err := db.DB()
			must(t, err)
			return pool, func(query string) error { return db.Exec(query).Error }
		},
		"bun": func(t *testing.T, dsn string) (*sql.DB, func(string) error) {
			pool, err := sql.Open("pgadvlock", dsn)
			must(t, err)
			db := bun.NewDB(pool, pgdialect.New())
			return pool, func(query string) error { _, err := db.Exec(query); return err }
		},
	} {
		t.Run(library, func(t *testing.T) {
			p := here(t)
			pool, wrong := open(t, p.dsn+"&pgadvlock_preset=observe")
			must(t, wrong("SELECT pg_advisory_lock(42)"))
			if !p.see.Held(42) {
				t.Error("observe changed what the program does")
			}
			if got := fmt.Sprint(rules(log.take())); got != "[leaked-session-lock pooled-session-lock]" {
				t.Errorf("reported %s", got)
			}
			must(t, pool.Close())
			log.take() // lost-lock: it was held to the end

			pool, wrong = open(t, p.dsn)
			defer pool.Close()
			c, _ := pgadvlock.ConnectorOf(pool)
			if err := wrong("SELECT pg_advisory_lock(42)"); err == nil {
				t.Error("not refused")
			}
			reported(t, pgadvlock.RulePooledSessionLock, "adopting_test.go")
			// One rule back to a report, in a running program.
			c.SetRule(pgadvlock.RulePooledSessionLock, pgadvlock.LevelWarn)
			must(t, wrong("SELECT pg_advisory_lock(42)"))
			p.nothingHeld(t)
			// All of them, for an incident.
			c.SetPreset(pgadvlock.PresetObserve)
			must(t, wrong("SELECT pg_advisory_lock(42)"))
			if !p.see.Held(42) {
				t.Error("observe released the lock")
			}
		})
	}
}

// A stragglers' list in the DSN, which is not lost when the preset is given there
// too.
func TestEnforceWithExceptions(t *testing.T) {
	p := here(t)
	p.dsn += "&pgadvlock_preset=enforce&pgadvlock_rules=pooled-session-lock:warn"
	_, err := p.open(t).Exec("SELECT pg_advisory_lock(42)")
	must(t, err)
	p.nothingHeld(t)
	if got := fmt.Sprint(rules(log.take())); got != "[leaked-session-lock pooled-session-lock]" {
		t.Errorf("reported %s", got)
	}
}

func TestWrapWhatOpensItself(t *testing.T) {
	p := here(t)
	config, err := pgx.ParseConfig(p.dsn)
	must(t, err)
	c, err := pgadvlock.WrapConnector(stdlib.GetConnector(*config), pgadvlock.WithPreset(pgadvlock.PresetObserve))
	must(t, err)
	db := sql.OpenDB(c)
	must(t, db.Ping())
	must(t, db.Close())

	base, err := pq.NewConnector(p.dsn)
	must(t, err)
	c, err = pgadvlock.WrapConnector(base, pgadvlock.WithPoolMode(pgadvlock.PoolDirect))
	must(t, err)
	db = sql.OpenDB(c)
	defer db.Close()
	leak(t, p, db)
}
