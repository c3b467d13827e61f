// What scripts/test-pgx puts beside pgx's own tests of its database/sql driver:
// a server for them, and the openings that replace pgx's.
package stdlib_test

import (
	"database/sql"
	"database/sql/driver"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

func init() { pgadvlock.Register("pgadvlock/v5") } // for "pgx/v5"

func TestMain(m *testing.M) {
	server, err := pgtest.Start()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Setenv("PGX_TEST_DATABASE", server.DSN("postgres"))
	code := m.Run()
	if err := server.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

func pgadvlockOpenDB(config pgx.ConnConfig, opts ...stdlib.OptionOpenDB) *sql.DB {
	return wrapped(stdlib.GetConnector(config, opts...))
}

func pgadvlockOpenDBFromPool(pool *pgxpool.Pool, opts ...stdlib.OptionOpenDB) *sql.DB {
	db := wrapped(stdlib.GetPoolConnector(pool, opts...))
	db.SetMaxIdleConns(0) // as stdlib.OpenDBFromPool
	return db
}

func wrapped(base driver.Connector) *sql.DB {
	c, err := pgadvlock.WrapConnector(base)
	if err != nil {
		panic(err) // an option or the environment is wrong
	}
	return sql.OpenDB(c)
}
