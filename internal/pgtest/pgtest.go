// Package pgtest is the ground that the tests stand on: a real PostgreSQL, and a
// real PgBouncer in front of it, started for one test binary and gone with it.
//
// It owns the servers' programs, directory, ports and end of life, a database
// for each test, and the view of another connection on who holds which advisory
// lock ([Observer]). It knows nothing of the driver under test, so that a defect
// there cannot hide here.
//
// Three ways to a server:
//
//   - [Shared]: one for all tests of the binary. A test takes a database of its
//     own from it ([Server.NewDB]): advisory locks are per database, so tests
//     can run in parallel.
//   - [Private]: one for this test alone, to be stopped, restarted or frozen.
//   - [Start]: one without package testing, for a program.
//
// Servers are found as follows. PGADVLOCK_TEST_DSN names one that runs already;
// then nothing is started. PGADVLOCK_TEST_PGBIN is the directory of initdb and
// postgres, else the usual places are searched; PGADVLOCK_TEST_PGBOUNCER is the
// PgBouncer program, else PATH and the usual places. Without a server a test is
// skipped, but fails where CI is set: there a skip would pass unseen.
package pgtest

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Server is a running PostgreSQL, with a PgBouncer in front of it where that
// program is installed. Its methods are safe for concurrent use, but for Stop,
// Restart and Close.
type Server struct {
	host    string
	port    int
	version int

	external string // the DSN of a server that was running before; nothing below is set then
	shared   bool   // belongs to all tests: must not be stopped by one of them

	sandbox     *sandbox
	bin         string   // directory of PostgreSQL's programs
	conf        []string // "name=value", after our own settings
	postgres    *process
	bouncerPath string // "" when there is no PgBouncer
	bouncer     *Bouncer
}

// errNotFound marks errors that mean "not installed", where a test is skipped.
var errNotFound = errors.New("not found")

// errExternal is why a test cannot have what only a server of our own offers.
var errExternal = errors.New("pgtest: PGADVLOCK_TEST_DSN is set: the test needs a server that pgtest starts itself")

// theShared is what Shared returns. Nothing closes it: the watchdog does, when the binary ends.
var theShared = sync.OnceValues(func() (*Server, error) {
	if dsn := os.Getenv("PGADVLOCK_TEST_DSN"); dsn != "" {
		return external(dsn)
	}
	s, err := Start()
	if err != nil {
		return nil, err
	}
	s.shared = true
	return s, nil
})

// Shared returns the one server of this test binary, and starts it at the first
// call. It skips the test when PostgreSQL is not installed.
func Shared(tb testing.TB) *Server {
	tb.Helper()
	s, err := theShared()
	require(tb, err)
	return s
}

// Private returns a server for this test alone, which the test may [Server.Stop],
// [Server.Restart] or [Freeze]. It is gone when the test ends. Each element of
// conf is a setting of postgres, as "name=value". It skips the test when
// PostgreSQL is not installed or PGADVLOCK_TEST_DSN is set.
func Private(tb testing.TB, conf ...string) *Server {
	tb.Helper()
	if os.Getenv("PGADVLOCK_TEST_DSN") != "" {
		tb.Skip(errExternal)
	}
	s, err := Start(conf...)
	require(tb, err)
	tb.Cleanup(func() {
		if tb.Failed() {
			tb.Logf("pgtest: the server's log:\n%s", s.Log())
		}
		if err := s.Close(); err != nil {
			tb.Error(err)
		}
	})
	return s
}

// Start starts a server of its own, whatever PGADVLOCK_TEST_DSN says. conf is as
// for [Private]. The server ends with Close, and in any case with this process.
func Start(conf ...string) (*Server, error) {
	bin, err := findPostgres()
	if err != nil {
		return nil, err
	}
	bouncer, err := findBouncer()
	if err != nil {
		return nil, err
	}
	s := &Server{host: "127.0.0.1", bin: bin, conf: slices.Clone(conf), bouncerPath: bouncer}
	if s.sandbox, err = newSandbox(); err != nil {
		return nil, err
	}
	if err := s.boot(); err != nil {
		return nil, errors.Join(err, s.sandbox.close())
	}
	return s, nil
}

// external is a server that ran before and stays.
func external(dsn string) (*Server, error) {
	cfg, err := pgconn.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("pgtest: PGADVLOCK_TEST_DSN: %w", err)
	}
	s := &Server{external: dsn, host: cfg.Host, port: int(cfg.Port), shared: true}
	if s.version, err = serverVersion(dsn); err != nil {
		return nil, fmt.Errorf("pgtest: PGADVLOCK_TEST_DSN: %w", err)
	}
	return s, nil
}

// Close ends the server and what belongs to it, and removes its directory.
func (s *Server) Close() error {
	if s.external != "" {
		return nil
	}
	if s.bouncer != nil {
		s.bouncer.Kill()
	}
	s.postgres.stop(syscall.SIGQUIT)
	return s.sandbox.close()
}

// Stop ends PostgreSQL as pg_ctl would in that mode: "smart", "fast" or
// "immediate". PgBouncer, if any, goes on. It is an error on a shared server.
func (s *Server) Stop(mode string) error {
	sig, ok := map[string]syscall.Signal{"smart": syscall.SIGTERM, "fast": syscall.SIGINT, "immediate": syscall.SIGQUIT}[mode]
	if !ok {
		return fmt.Errorf("pgtest: stop mode %q: want smart, fast or immediate", mode)
	}
	if s.shared {
		return errors.New("pgtest: other tests use the shared server too: take a Private one to stop it")
	}
	return s.postgres.stop(sig)
}

// Restart starts PostgreSQL again on the same port and data, after a fast stop
// if it still runs. It is an error on a shared server.
func (s *Server) Restart() error {
	if err := s.Stop("fast"); err != nil {
		return err
	}
	return s.startPostgres(s.port)
}

// NewDB makes an empty database for the test and drops it when the test ends,
// under whoever is still connected. The name needs no quoting.
func (s *Server) NewDB(tb testing.TB) string {
	tb.Helper()
	name := databaseName(tb.Name())
	if err := s.CreateDB(name); err != nil {
		tb.Fatal(err)
	}
	if !s.shared {
		return name // ends with its server, which the test may have stopped by then
	}
	tb.Cleanup(func() {
		if err := s.dropDB(name); err != nil {
			tb.Errorf("pgtest: the test's database stays behind: %v", err)
		}
	})
	return name
}

// dropDB drops a database of NewDB's. WITH (FORCE) looks again only every 100 ms
// whether the backends it ended are gone: most often they are when it begins.
func (s *Server) dropDB(name string) error {
	poll(time.Second, func() bool {
		rows, err := query(s.DSN("postgres"), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '"+name+"'")
		return err == nil && len(rows) == 0
	})
	return s.Exec("postgres", "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
}

// databaseName makes a name out of the test's, for whoever reads the server's
// log, and eight random bytes: several binaries may share an external server.
func databaseName(test string) string {
	word := strings.Map(func(r rune) rune {
		switch {
		case r >= 'A' && r <= 'Z':
			return r + 'a' - 'A'
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, test)
	var b [8]byte
	rand.Read(b[:])
	return word[:min(len(word), 40)] + "_" + hex.EncodeToString(b[:]) // at most 57 of NAMEDATALEN's 63
}

// CreateDB makes an empty database that stays until the server ends.
func (s *Server) CreateDB(name string) error {
	return s.Exec("postgres", "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
}

// DSN is the URL of a database over TCP, as a superuser and without TLS. Of an
// external server it is PGADVLOCK_TEST_DSN with that database.
func (s *Server) DSN(db string) string {
	if s.external != "" {
		return withDatabase(s.external, db)
	}
	return tcpDSN("postgres", s.host, s.port, db)
}

// SocketDSN is the URL of a database over the Unix socket, or "" for an external server.
func (s *Server) SocketDSN(db string) string {
	if s.external != "" {
		return ""
	}
	return socketDSN("postgres", s.sandbox.dir, s.port, db)
}

func tcpDSN(user, host string, port int, db string) string {
	return fmt.Sprintf("postgres://%s@%s:%d/%s?sslmode=disable", user, host, port, url.PathEscape(db))
}

func socketDSN(user, dir string, port int, db string) string {
	return fmt.Sprintf("postgres://%s@/%s?host=%s&port=%d&sslmode=disable", user, url.PathEscape(db), url.QueryEscape(dir), port)
}

// withDatabase replaces the database of a DSN in URL or keyword form.
func withDatabase(dsn, db string) string {
	if u, err := url.Parse(dsn); err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql") {
		q := u.Query()
		q.Del("dbname")
		q.Del("database")
		u.Path, u.RawQuery = "/"+db, q.Encode()
		return u.String()
	}
	quoted := strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(db)
	return dsn + " dbname='" + quoted + "'" // the last of several counts
}

// External says whether the server is PGADVLOCK_TEST_DSN's: then there is no
// socket, log or PgBouncer of its own.
func (s *Server) External() bool { return s.external != "" }

// Host is the address that PostgreSQL and PgBouncer listen on.
func (s *Server) Host() string { return s.host }

// Port is PostgreSQL's TCP port.
func (s *Server) Port() int { return s.port }

// Version is the server's server_version_num, such as 150018.
func (s *Server) Version() int { return s.version }

// PID is the process id of the postmaster, for [Freeze]; 0 for an external server.
func (s *Server) PID() int {
	if s.external != "" {
		return 0
	}
	return s.postgres.pid
}

// Log is what PostgreSQL has logged so far, each line with time, [pid], user and
// database; "" for an external server. Statements are logged only on request
// (ALTER DATABASE x SET log_statement = 'all').
func (s *Server) Log() string { return s.LogFrom(0) }

// LogMark is the end of the log now, for [Server.LogFrom].
func (s *Server) LogMark() int { return len(s.Log()) }

// LogFrom is what PostgreSQL has logged since the mark.
func (s *Server) LogFrom(mark int) string {
	if s.external != "" {
		return ""
	}
	return s.postgres.output(mark)
}

// Exec runs SQL, perhaps several statements, on a connection of its own.
func (s *Server) Exec(db, sql string) error {
	_, err := query(s.DSN(db), sql)
	return err
}

// queryTimeout bounds our own statements. It is long: a CREATE DATABASE takes its time on a loaded machine.
const queryTimeout = time.Minute

// query runs SQL in the simple protocol, which PgBouncer's console wants, and
// returns the rows of the last result as text.
func query(dsn, sql string) ([][]string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), queryTimeout)
	defer cancel()
	conn, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		return nil, fmt.Errorf("pgtest: %w", err)
	}
	defer conn.Close(ctx)
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil {
		return nil, fmt.Errorf("pgtest: %q: %w", sql, err)
	}
	var rows [][]string
	if len(results) > 0 {
		for _, values := range results[len(results)-1].Rows {
			row := make([]string, len(values))
			for i, v := range values {
				row[i] = string(v)
			}
			rows = append(rows, row)
		}
	}
	return rows, nil
}

func serverVersion(dsn string) (int, error) {
	rows, err := query(dsn, "SHOW server_version_num")
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(rows[0][0])
}

// require ends the test over an error: skipped when something is not installed
// and this is somebody's own machine.
func require(tb testing.TB, err error) {
	tb.Helper()
	switch {
	case err == nil:
	case errors.Is(err, errNotFound) && os.Getenv("CI") == "":
		tb.Skip(err)
	default:
		tb.Fatal(err)
	}
}
