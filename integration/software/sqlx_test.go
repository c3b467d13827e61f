package software

import (
	"testing"

	"github.com/XSAM/otelsql"
	"github.com/jmoiron/sqlx"

	"github.com/pgadvlock/pgadvlock"
)

// sqlx knows the placeholders of drivers by their names, and not this one's.
func init() { sqlx.BindDriver("pgadvlock", sqlx.DOLLAR) }

type person struct {
	ID        int64
	FirstName string `db:"first_name"`
	Email     *string
}

func TestSqlx(t *testing.T) {
	everywhere(t, func(t *testing.T, p place) {
		db, err := sqlx.ConnectContext(t.Context(), "pgadvlock", p.dsn)
		must(t, err)
		defer db.Close()
		db.MustExec("CREATE TABLE person (id bigserial PRIMARY KEY, first_name text, email text)")
		_, err = db.NamedExec("INSERT INTO person (first_name, email) VALUES (:first_name, :email)", []person{{FirstName: "Jason"}, {FirstName: "John"}})
		must(t, err)
		var people []person
		must(t, db.Select(&people, "SELECT * FROM person ORDER BY id"))
		var jason person
		must(t, db.Get(&jason, "SELECT * FROM person WHERE first_name = $1", "Jason"))
		if len(people) != 2 || jason.ID != 1 || jason.Email != nil {
			t.Errorf("%+v, %+v", people, jason)
		}
		query, args, err := sqlx.In("SELECT * FROM person WHERE id IN (?)", []int{1, 2, 3})
		must(t, err)
		must(t, db.Select(&people, db.Rebind(query), args...))
		rows, err := db.NamedQuery("SELECT * FROM person WHERE first_name = :fn", map[string]any{"fn": "John"})
		must(t, err)
		for rows.Next() {
			must(t, rows.StructScan(&jason))
		}
		must(t, rows.Err())
		named, err := db.PrepareNamed("SELECT count(*) FROM person WHERE first_name = :first_name")
		must(t, err)
		var n int
		must(t, named.Get(&n, person{FirstName: "John"}))
		must(t, named.Close())
		if len(people) != 2 || jason.ID != 2 || n != 1 {
			t.Errorf("%+v, %+v, %d", people, jason, n)
		}

		// Locks: in a transaction, and on a connection of their own.
		tx := db.MustBegin()
		tx.MustExec("SELECT pg_advisory_xact_lock($1)", 42)
		must(t, tx.Commit())
		conn, err := db.Connx(t.Context())
		must(t, err)
		var got bool
		must(t, conn.GetContext(t.Context(), &got, "SELECT pg_try_advisory_lock($1)", 42))
		if !got || !p.see.Held(42) {
			t.Error("not held")
		}
		must(t, conn.GetContext(t.Context(), &got, "SELECT pg_advisory_unlock($1)", 42))
		must(t, conn.Close())
		silent(t)

		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { _, err := db.Exec("SELECT pg_advisory_lock(42)"); return err })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.Get(&got, "SELECT pg_try_advisory_lock($1)", 42) })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { _, err := db.Queryx("SELECT pg_try_advisory_lock($1)", 42); return err })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error { return db.QueryRowx("SELECT pg_try_advisory_lock($1)", 42).Scan(&got) })
		p.refused(t, pgadvlock.RulePooledSessionLock, func() error {
			_, err := db.NamedExec("SELECT pg_advisory_unlock(:key)", map[string]any{"key": 42})
			return err
		})
		leak(t, p, db.DB)
	})
}

// sqlx does not know this driver's name, nor those that a wrapper makes up:
// without BindDriver it leaves names and question marks as they are. A name that
// it knows can be given instead, to NewDb.
func TestIssue_otelsqlXSAM614_sqlx390_520(t *testing.T) {
	p := here(t)
	wrapper, err := otelsql.Register("pgadvlock")
	must(t, err)
	db, err := sqlx.Open(wrapper, p.dsn)
	must(t, err)
	defer db.Close()
	if _, err := db.NamedQuery("SELECT CAST(:n AS int)", map[string]any{"n": 1}); err == nil {
		t.Error("NamedQuery works: is BindDriver still needed?")
	}
	bind := func(db *sqlx.DB) {
		var n int
		must(t, db.Get(&n, db.Rebind("SELECT ?::int"), 7))
		rows, err := db.NamedQuery("SELECT CAST(:n AS int)", map[string]any{"n": 8})
		must(t, err)
		defer rows.Close()
		if !rows.Next() {
			t.Fatal(rows.Err())
		}
		if must(t, rows.Scan(&n)); n != 8 {
			t.Error(n)
		}
	}
	bind(sqlx.NewDb(db.DB, "pgx"))
	sqlx.BindDriver(wrapper, sqlx.DOLLAR)
	again := sqlx.MustOpen(wrapper, p.dsn)
	defer again.Close()
	bind(again)
}
