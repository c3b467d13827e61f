package integration

// Seams: what a program may put under the driver, or ask it for, and what must
// get through to pgx.

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"database/sql"
	"database/sql/driver"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgadvlock/pgadvlock"
	"github.com/pgadvlock/pgadvlock/internal/pgtest"
)

// open opens a database by the driver's name, and closes it with the test.
func open(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db := byName("pgadvlock")(t, dsn)
	t.Cleanup(func() { db.Close() })
	return db
}

// locksWork checks the whole way of a lock on a pool: taken, seen by others,
// and gone when its connection is back, which stays in the pool because its
// road is known to be direct.
func locksWork(t *testing.T, db *sql.DB, see *pgtest.Observer) {
	t.Helper()
	conn, err := db.Conn(t.Context())
	must(t, err)
	exec(t, conn, "SELECT pg_advisory_lock(42)")
	if !see.Held(42) {
		t.Error("the lock is not held")
	}
	must(t, conn.Close())
	if locks := see.Locks(); len(locks) > 0 {
		t.Errorf("held after the return: %v", locks)
	}
	if idle := db.Stats().Idle; idle != 1 {
		t.Errorf("%d idle connections: the road is not taken for direct", idle)
	}
}

// database returns a database of the shared server, and who looks on.
func database(t *testing.T) (*pgtest.Server, string, *pgtest.Observer) {
	t.Helper()
	server := pgtest.Shared(t)
	name := server.NewDB(t)
	return server, name, pgtest.Observe(t, server.DSN(name))
}

// closingConnector is a connector that has something to close, as those that
// sign in to a cloud have.
type closingConnector struct {
	driver.Connector
	closed atomic.Int32
}

func (c *closingConnector) Close() error {
	c.closed.Add(1)
	return errors.New("close fails")
}

// What a connector has to close is closed with the pool, once, and its error is
// the pool's.
func TestIssue_golang41790(t *testing.T) {
	server, name, see := database(t)
	base := &closingConnector{Connector: stdlib.GetConnector(*parse(t, server.DSN(name)))}
	db := wrap(t, base)
	locksWork(t, db, see)
	if n := base.closed.Load(); n != 0 {
		t.Errorf("closed %d times before the pool was", n)
	}
	if err := db.Close(); err == nil || err.Error() != "close fails" {
		t.Errorf("Close returns %v", err)
	}
	if n := base.closed.Load(); n != 1 {
		t.Errorf("closed %d times", n)
	}
}

// A DSN is read once, when the pool is opened, and what is wrong with our part
// of it is said there.
func TestDriverContext(t *testing.T) {
	server, name, _ := database(t)
	if _, err := sql.Open("pgadvlock", server.DSN(name)+"&pgadvlock_preset=lax"); err == nil || !strings.Contains(err.Error(), "pgadvlock_preset") {
		t.Errorf("sql.Open of a wrong setting: %v", err)
	}
	db := open(t, server.DSN(name))
	c, ok := pgadvlock.ConnectorOf(db)
	if !ok {
		t.Fatal("no Connector")
	}
	// All connections belong to it: what they hold is one view.
	for range 2 {
		conn, err := db.Conn(t.Context())
		must(t, err)
		defer conn.Close()
		exec(t, conn, "SELECT pg_try_advisory_lock(pg_backend_pid())")
	}
	if n := len(c.Sessions()); n != 2 {
		t.Errorf("%d sessions of one Connector", n)
	}
}

// sql.DB.Driver is used by tools to open more connections.
func TestDriverOfADB(t *testing.T) {
	server, name, see := database(t)
	for _, db := range map[string]*sql.DB{"by name": open(t, server.DSN(name)), "wrapped": wrap(t, stdlib.GetConnector(*parse(t, server.DSN(name))))} {
		defer db.Close()
		d, ok := db.Driver().(*pgadvlock.Driver)
		if !ok {
			t.Fatalf("Driver is %T", db.Driver())
		}
		conn, err := d.Open(server.DSN(name))
		must(t, err)
		if _, err := conn.(driver.ExecerContext).ExecContext(t.Context(), "SELECT pg_advisory_lock(42)", nil); err != nil {
			t.Error(err)
		}
		if !see.Held(42) {
			t.Error("not held")
		}
		must(t, conn.Close())
		see.WaitFor(time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
	}
}

// pgx's hooks run as often, in the same order and on the same connections as
// without pgadvlock, and their errors do what they do there.
func TestHooksOfPgx(t *testing.T) {
	server, name, _ := database(t)
	script := func(open func(pgx.ConnConfig, ...stdlib.OptionOpenDB) *sql.DB) (lines []string) {
		say := func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
		fail := ""
		db := open(*parse(t, server.DSN(name)),
			stdlib.OptionBeforeConnect(func(_ context.Context, c *pgx.ConnConfig) error {
				say("before connect")
				c.RuntimeParams["application_name"] = "hooked"
				if fail == "before" {
					return errors.New("refused before")
				}
				return nil
			}),
			stdlib.OptionAfterConnect(func(ctx context.Context, c *pgx.Conn) error {
				say("after connect")
				_, err := c.Exec(ctx, "SET my.own = 'set'")
				if fail == "after" {
					return errors.New("refused after")
				}
				return err
			}),
			stdlib.OptionResetSession(func(ctx context.Context, c *pgx.Conn) error {
				var tag string
				err := c.QueryRow(ctx, "SHOW my.own").Scan(&tag)
				say("reset session %s %v", tag, err)
				switch fail {
				case "reset":
					fail = ""
					return driver.ErrBadConn
				case "reset badly":
					return errors.New("refused at reset")
				}
				return nil
			}),
			stdlib.OptionShouldPing(func(_ context.Context, p stdlib.ShouldPingParams) bool {
				say("should ping %t", p.Conn.IsClosed())
				return fail == "ping"
			}),
		)
		defer db.Close()
		for _, fail = range []string{"", "", "ping", "reset", "reset badly", "before", "after", ""} {
			say("fail: %q", fail)
			if fail == "before" || fail == "after" {
				db.SetMaxIdleConns(-1)
				db.SetMaxIdleConns(2)
			}
			var app string
			err := db.QueryRowContext(t.Context(), "SHOW application_name").Scan(&app)
			say("%s %v", app, err)
			conn, err := db.Conn(t.Context())
			if say("conn %v", err); err == nil {
				_, err := conn.ExecContext(t.Context(), "SELECT pg_advisory_lock(1), pg_advisory_unlock(1)")
				say("lock %v, close %v", err, conn.Close())
			}
		}
		say("open %d", db.Stats().OpenConnections)
		return lines
	}
	plain := script(stdlib.OpenDB)
	wrapped := script(func(c pgx.ConnConfig, opts ...stdlib.OptionOpenDB) *sql.DB {
		return wrap(t, stdlib.GetConnector(c, opts...))
	})
	compareScripts(t, plain, wrapped)
	if len(plain) < 40 {
		t.Errorf("the hooks were hardly called: %q", plain)
	}
}

// Over a pgxpool the pool's own hooks run, and a connection goes back to it
// clean.
func TestPoolConnector(t *testing.T) {
	server, name, see := database(t)
	config, err := pgxpool.ParseConfig(server.DSN(name))
	must(t, err)
	config.MaxConns = 2
	var acquired, released atomic.Int32
	var heldAtRelease atomic.Bool
	//lint:ignore SA1019 programs have it
	config.BeforeAcquire = func(context.Context, *pgx.Conn) bool { acquired.Add(1); return true }
	config.AfterRelease = func(c *pgx.Conn) bool {
		released.Add(1)
		var held bool
		if err := c.QueryRow(context.Background(), "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid())").Scan(&held); err != nil || held {
			heldAtRelease.Store(true)
		}
		return true
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	must(t, err)
	defer pool.Close()
	db := wrap(t, stdlib.GetPoolConnector(pool))
	db.SetMaxIdleConns(0)
	defer db.Close()
	for range 3 {
		conn, err := db.Conn(t.Context())
		must(t, err)
		exec(t, conn, "SELECT pg_advisory_lock(42)")
		must(t, conn.Close())
		if locks := see.Locks(); len(locks) > 0 {
			t.Errorf("held: %v", locks)
		}
		pgtest.Eventually(t, 5*time.Second, "the pool has it back", func() bool { return pool.Stat().IdleConns() == 1 })
	}
	if n := released.Load(); n != 3 {
		t.Errorf("%d releases", n)
	}
	if heldAtRelease.Load() {
		t.Error("the pool got a connection that held a lock")
	}
	if n := pool.Stat().NewConnsCount(); n != 1 || acquired.Load() < 2 {
		t.Errorf("%d connections, %d acquired: the pool does not get its connection back", n, acquired.Load())
	}
	must(t, db.Close())
	must(t, pool.Ping(t.Context())) // closing the DB does not close the pool
}

// deadPort is a port where nobody listens.
func deadPort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// A DSN with several hosts goes to the first that answers and is of the kind
// that was asked for; locks there are found to be direct, although the first
// name in the DSN is another host's.
func TestSeveralHosts(t *testing.T) {
	server, name, see := database(t)
	if server.External() {
		t.Skip("needs the ports of servers of its own")
	}
	readOnly := pgtest.Private(t)
	must(t, readOnly.Exec("postgres", "ALTER SYSTEM SET default_transaction_read_only = on"))
	must(t, readOnly.Exec("postgres", "SELECT pg_reload_conf()"))
	pgtest.Eventually(t, 10*time.Second, "the server is read-only", func() bool {
		return readOnly.Exec("postgres", "CREATE TEMP TABLE writes ()") != nil
	})
	dead := deadPort(t)
	for _, dsn := range []string{
		fmt.Sprintf("postgres://postgres@%s:%d,%[1]s:%[3]d/%s?sslmode=disable", server.Host(), dead, server.Port(), name),
		fmt.Sprintf("host=%s,%[1]s port=%d,%d user=postgres dbname=%s sslmode=prefer", server.Host(), dead, server.Port(), name),
		fmt.Sprintf("postgres://postgres@%s:%d,%[1]s:%[3]d/%s?target_session_attrs=read-write&pgadvlock_preset=strict", server.Host(), readOnly.Port(), server.Port(), "postgres"),
	} {
		t.Run(dsn, func(t *testing.T) {
			db := open(t, dsn)
			see := see
			if strings.Contains(dsn, "read-write") {
				see = pgtest.Observe(t, server.DSN("postgres"))
			}
			var port int
			must(t, db.QueryRow("SELECT inet_server_port()").Scan(&port))
			if port != server.Port() {
				t.Errorf("connected to %d", port)
			}
			locksWork(t, db, see)
		})
	}
}

// Where the connection's parameters come from elsewhere, they come from there.
func TestServiceFileAndEnvironment(t *testing.T) {
	server, name, see := database(t)
	if server.External() {
		t.Skip("needs a server of its own")
	}
	service := filepath.Join(t.TempDir(), "services")
	must(t, os.WriteFile(service, fmt.Appendf(nil, "[locks]\nhost=%s\nport=%d\nuser=postgres\ndbname=%s\nsslmode=disable\napplication_name=served\n", server.Host(), server.Port(), name), 0o600))
	for dsn, app := range map[string]string{
		"service=locks servicefile=" + service:                                                                   "served",
		"service=locks servicefile=" + service + " pgadvlock_rules=weak-key:error":                               "served",
		"postgres:///?service=locks&servicefile=" + service + "&pgadvlock_pool_mode=direct&application_name=own": "own",
	} {
		db := open(t, dsn)
		var got string
		must(t, db.QueryRow("SHOW application_name").Scan(&got))
		if got != app {
			t.Errorf("%s: application_name %q", dsn, got)
		}
		locksWork(t, db, see)
	}
	t.Setenv("PGHOST", server.Host())
	t.Setenv("PGPORT", fmt.Sprint(server.Port()))
	t.Setenv("PGUSER", "postgres")
	t.Setenv("PGDATABASE", name)
	t.Setenv("PGSSLMODE", "disable")
	for _, dsn := range []string{"", "pgadvlock_reset_timeout=3s", "postgres://", "postgresql:///?pgadvlock_preset=strict"} {
		locksWork(t, open(t, dsn), see)
	}
}

// Passwords come from ~/.pgpass and the like, and are in no error.
func TestPasswordFile(t *testing.T) {
	hba := filepath.Join(readableDir(t), "pg_hba.conf")
	must(t, os.WriteFile(hba, []byte("local all all trust\nhost all locker all scram-sha-256\nhost all all all trust\n"), 0o644))
	server := pgtest.Private(t, "hba_file="+hba)
	name := server.NewDB(t)
	see := pgtest.Observe(t, server.DSN(name))
	see.Exec("CREATE ROLE locker LOGIN PASSWORD 'canary-right'")
	pass := filepath.Join(t.TempDir(), "pgpass")
	dsn := fmt.Sprintf("postgres://locker@%s:%d/%s?sslmode=disable&passfile=%s", server.Host(), server.Port(), name, pass)

	must(t, os.WriteFile(pass, fmt.Appendf(nil, "%s:%d:%s:locker:canary-right\n", server.Host(), server.Port(), name), 0o600))
	locksWork(t, open(t, dsn), see)
	must(t, os.WriteFile(pass, fmt.Appendf(nil, "*:*:*:locker:canary-wrong\n"), 0o600))
	for _, dsn := range []string{
		dsn, dsn + "&pgadvlock_preset=observe", dsn + "&pgadvlock_preset=canary-no&password=canary-wrong",
		dsn + "&pgadvlock_preset=strict;password=canary-wrong", dsn + "&pgadvlock_reset=close password=canary-wrong", "pgadvlock_reset=close;password=canary-wrong",
		fmt.Sprintf("host=%s port=%d user=locker password='canary-wrong' dbname=%s sslmode=disable", server.Host(), server.Port(), name),
		fmt.Sprintf("postgres://locker:canary-wrong@%s:%d/%s?sslmode=disable&pgadvlock_reset=close", server.Host(), server.Port(), name),
		fmt.Sprintf("postgres://locker:canary-wrong@%s:%d/%s?sslmode=nonsense", server.Host(), server.Port(), name),
		fmt.Sprintf("host=%s password='canary-wrong pgadvlock_preset=strict", server.Host()),
	} {
		err := func() error {
			db, err := sql.Open("pgadvlock", dsn)
			if err != nil {
				return err
			}
			defer db.Close()
			return db.PingContext(t.Context())
		}()
		if err == nil || strings.Contains(err.Error(), "canary-wrong") || strings.Contains(err.Error(), "canary-right") {
			t.Errorf("%s: %v", dsn, err)
		}
	}
}

// readableDir is a directory that the server's user can read.
func readableDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/" && d != "."; d = filepath.Dir(d) {
		must(t, os.Chmod(d, 0o755))
	}
	return dir
}

// TLS, with a certificate that is checked and one that is not to be trusted.
func TestTLS(t *testing.T) {
	server := pgtest.Private(t)
	name := server.NewDB(t)
	see := pgtest.Observe(t, server.DSN(name))
	var dir string
	must(t, see.Conn().QueryRow(t.Context(), "SHOW data_directory").Scan(&dir))
	root := filepath.Join(t.TempDir(), "root.crt")
	certificate(t, dir, root)
	other := filepath.Join(t.TempDir(), "other.crt")
	certificate(t, t.TempDir(), other)
	see.Exec("ALTER SYSTEM SET ssl = on")
	see.Exec("SELECT pg_reload_conf()")
	address := fmt.Sprintf("postgres://postgres@localhost:%d/%s?sslmode=", server.Port(), name)
	pgtest.Eventually(t, 10*time.Second, "the server speaks TLS", func() bool {
		conn, err := pgconn.Connect(t.Context(), address+"require")
		if err == nil {
			err = conn.Close(t.Context())
		}
		return err == nil
	})
	for mode, encrypted := range map[string]bool{
		"disable": false, "prefer": true, "require": true, "verify-ca&sslrootcert=" + root: true, "verify-full&sslrootcert=" + root: true,
		"verify-full&sslrootcert=" + root + "&sslnegotiation=postgres&pgadvlock_preset=strict": true,
	} {
		t.Run(mode, func(t *testing.T) {
			db := open(t, address+mode)
			var got bool
			must(t, db.QueryRow("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()").Scan(&got))
			if got != encrypted {
				t.Errorf("encrypted: %t", got)
			}
			locksWork(t, db, see)
		})
	}
	for _, dsn := range []string{address + "verify-full&sslrootcert=" + other, strings.Replace(address, "localhost", "127.0.0.1", 1) + "verify-full&sslrootcert=" + root} {
		plain, wrapped := byName("pgx")(t, dsn).Ping(), open(t, dsn).Ping()
		if wrapped == nil || plain.Error() != wrapped.Error() {
			t.Errorf("%s:\n   plain: %v\nwrapped: %v", dsn, plain, wrapped)
		}
	}
}

// certificate makes a key and a certificate for localhost in the server's
// directory, and writes the certificate alone to root.
func certificate(t *testing.T, dir, root string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	must(t, err)
	private, err := x509.MarshalECPrivateKey(key)
	must(t, err)
	cert := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	must(t, os.WriteFile(root, cert, 0o644))
	must(t, os.WriteFile(filepath.Join(dir, "server.crt"), cert, 0o644))
	keyFile := filepath.Join(dir, "server.key")
	must(t, os.WriteFile(keyFile, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private}), 0o600))
	ownAs(t, keyFile, dir)
}

func TestUnixSocket(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no Unix sockets")
	}
	server, name, see := database(t)
	if server.External() {
		t.Skip("needs a server of its own")
	}
	db := open(t, server.SocketDSN(name)+"&pgadvlock_preset=strict")
	locksWork(t, db, see)
	if mode := poolMode(t, db); mode != pgadvlock.PoolDirect {
		t.Errorf("pool mode %s", mode)
	}
}

// poolMode is what the driver found out about a connection.
func poolMode(t *testing.T, db *sql.DB) (mode pgadvlock.PoolMode) {
	t.Helper()
	conn, err := db.Conn(t.Context())
	must(t, err)
	defer conn.Close()
	must(t, conn.Raw(func(c any) (err error) {
		mode, _, err = c.(*pgadvlock.Conn).PoolMode(t.Context())
		return err
	}))
	return mode
}

// spy is a tracer of the user's, and takes notices.
type spy struct{ lines []string }

func (s *spy) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	args := slices.DeleteFunc(slices.Clone(d.Args), func(a any) bool { // pgx's options, which stand before the arguments
		switch a.(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
			return true
		}
		return false
	})
	s.lines = append(s.lines, fmt.Sprintf("start %s %v", d.SQL, args))
	return ctx
}

func (s *spy) TraceQueryEnd(_ context.Context, _ *pgx.Conn, d pgx.TraceQueryEndData) {
	s.lines = append(s.lines, fmt.Sprintf("end %s %v", d.CommandTag, d.Err))
}

func (s *spy) TraceConnectStart(ctx context.Context, d pgx.TraceConnectStartData) context.Context {
	s.lines = append(s.lines, "connect "+d.ConnConfig.User)
	return ctx
}

func (s *spy) TraceConnectEnd(_ context.Context, d pgx.TraceConnectEndData) {
	s.lines = append(s.lines, fmt.Sprintf("connected %v", d.Err))
}

func (s *spy) TracePrepareStart(ctx context.Context, _ *pgx.Conn, d pgx.TracePrepareStartData) context.Context {
	s.lines = append(s.lines, "prepare "+d.SQL)
	return ctx
}

func (s *spy) TracePrepareEnd(_ context.Context, _ *pgx.Conn, d pgx.TracePrepareEndData) {
	s.lines = append(s.lines, fmt.Sprintf("prepared %t %v", d.AlreadyPrepared, d.Err))
}

// A configuration registered with pgx works under its name, with the tracers
// and the notice handler in it, which see what the program sent and nothing of
// ours. An Exec of a try or an unlock without arguments reaches tracers as the
// query that it is.
func TestIssue_newrelicGoAgent435(t *testing.T) {
	server, name, see := database(t)
	see.Exec("CREATE FUNCTION warns() RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE WARNING 'so'; END $$")
	script := func(driver string) []string {
		s := &spy{}
		config := parse(t, server.DSN(name))
		config.Tracer = s
		config.OnNotice = func(_ *pgconn.PgConn, n *pgconn.Notice) { s.lines = append(s.lines, "notice "+n.Message) }
		registered := stdlib.RegisterConnConfig(config)
		defer stdlib.UnregisterConnConfig(registered)
		db := byName(driver)(t, registered)
		defer db.Close()
		conn, err := db.Conn(t.Context())
		must(t, err)
		for _, query := range []string{
			"SELECT warns()", "SELECT pg_advisory_lock(1)", "SELECT pg_try_advisory_lock(1)", "SELECT pg_advisory_unlock(1)", "SELECT pg_advisory_unlock(1)", "SELECT pg_advisory_unlock(1)",
			"SELECT pg_advisory_unlock_all()", "SELECT 1/0", "SELECT pg_advisory_lock(1) FROM nowhere", "SELECT 1",
		} {
			_, _ = conn.ExecContext(t.Context(), query)
			if rows, err := conn.QueryContext(t.Context(), query); err == nil {
				rows.Close()
			}
			if stmt, err := conn.PrepareContext(t.Context(), query); err == nil {
				_, _ = stmt.ExecContext(t.Context())
				must(t, stmt.Close())
			}
		}
		exec(t, conn, "SELECT pg_advisory_lock($1)", 7)
		must(t, conn.Close())
		conn, err = db.Conn(t.Context())
		must(t, err)
		exec(t, conn, "SELECT pg_advisory_lock($1)", 8) // of this one the ledger is exact at the return
		must(t, conn.Close())
		return s.lines
	}
	plain, wrapped := script("pgx"), script("pgadvlock")
	compareScripts(t, plain, wrapped)
	if !slices.Contains(plain, "notice so") || !slices.Contains(plain, "prepare SELECT pg_advisory_lock(1)") {
		t.Errorf("the tracer saw too little: %q", plain)
	}
}

// What Exec sends as a query goes by the extended protocol where pgx's goes by
// the simple one, which shows in the place of the server's source that an error
// names, and in nothing else of it. Where the simple one was asked for, the server
// may know no other.
func TestProtocolOfExec(t *testing.T) {
	server, name, _ := database(t)
	failed := func(driver, params, query string) pgconn.PgError {
		db := byName(driver)(t, server.DSN(name)+params)
		defer db.Close()
		conn, err := db.Conn(t.Context())
		must(t, err)
		defer conn.Close()
		exec(t, conn, "BEGIN")
		_, err = conn.ExecContext(t.Context(), "SELECT 1/0")
		if err == nil {
			t.Error("1/0 succeeded")
		}
		_, err = conn.ExecContext(t.Context(), query)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) {
			t.Fatalf("error %v", err)
		}
		return *pg
	}
	const simple, extended = "exec_simple_query", "exec_parse_message"
	for _, c := range []struct{ params, query, routine string }{
		{"", "SELECT pg_try_advisory_lock(1)", extended}, {"", "SELECT pg_advisory_unlock(1)", extended}, {"", "SELECT pg_advisory_lock(1)", simple},
		{"&default_query_exec_mode=simple_protocol", "SELECT pg_try_advisory_lock(1)", simple},
	} {
		want, got := failed("pgx", c.params, c.query), failed("pgadvlock", c.params, c.query)
		if want.Routine != simple || got.Routine != c.routine {
			t.Errorf("%v: on pgx from %s, on pgadvlock from %s", c, want.Routine, got.Routine)
		}
		want.Routine, want.Line = got.Routine, got.Line
		if got != want {
			t.Errorf("%v: on pgx %+v, on pgadvlock %+v", c, want, got)
		}
	}
}

// pgx's statement caches are as large as the DSN says, lock statements in them
// or not.
func TestStatementCacheSettings(t *testing.T) {
	server, name, _ := database(t)
	script := func(driver, params string) (lines []string) {
		db := byName(driver)(t, server.DSN(name)+params)
		defer db.Close()
		conn, err := db.Conn(t.Context())
		if err != nil {
			return []string{err.Error()}
		}
		defer conn.Close()
		for i := range 6 {
			for _, query := range []string{fmt.Sprintf("SELECT %d + $1::int", i), fmt.Sprintf("SELECT pg_advisory_lock(%d + $1)", i), fmt.Sprintf("SELECT pg_advisory_unlock(%d + $1)", i)} {
				rows, err := conn.QueryContext(t.Context(), query, 1)
				if err == nil {
					err = rows.Close()
				}
				_, execErr := conn.ExecContext(t.Context(), query, 1)
				lines = append(lines, fmt.Sprint(err, execErr))
			}
		}
		rows, err := conn.QueryContext(t.Context(), "SELECT statement FROM pg_prepared_statements ORDER BY 1", pgx.QueryExecModeSimpleProtocol)
		must(t, err)
		for rows.Next() {
			var s string
			must(t, rows.Scan(&s))
			lines = append(lines, s)
		}
		return append(lines, fmt.Sprint(rows.Err()))
	}
	for _, params := range []string{"", "&statement_cache_capacity=2", "&statement_cache_capacity=0", "&description_cache_capacity=1&default_query_exec_mode=cache_describe", "&default_query_exec_mode=exec", "&statement_cache_capacity=x"} {
		t.Run(params, func(t *testing.T) {
			compareScripts(t, script("pgx", params), script("pgadvlock", params))
		})
	}
}

// In each of pgx's modes, set for the connection or for one call, nothing is
// held after the return.
func TestNothingLeaksInAnyExecMode(t *testing.T) {
	server, name, see := database(t)
	for _, mode := range execModes {
		t.Run(mode, func(t *testing.T) {
			db := open(t, server.DSN(name)+"&pgadvlock_preset=strict&default_query_exec_mode="+mode)
			for leak, do := range leaks {
				conn, err := db.Conn(t.Context())
				must(t, err)
				do(t, conn)
				if len(see.Locks()) == 0 {
					t.Errorf("%s: nothing to leak", leak)
				}
				must(t, conn.Close())
				if locks := see.Locks(); len(locks) > 0 {
					t.Errorf("%s: held: %v", leak, locks)
				}
			}
		})
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run("one call, "+mode.String(), func(t *testing.T) {
			db := open(t, server.DSN(name)+"&pgadvlock_preset=strict")
			c, _ := pgadvlock.ConnectorOf(db)
			conn, err := db.Conn(t.Context())
			must(t, err)
			exec(t, conn, "SELECT pg_advisory_lock($1)", mode, 42)
			exec(t, conn, "SELECT pg_try_advisory_lock($1, $2)", mode, 4, 2)
			sessions := c.Sessions()
			if len(sessions) != 1 || !sessions[0].Exact || len(sessions[0].Held) != 2 || sessions[0].Held[0].Key.String() != "42" {
				t.Errorf("the arguments behind the mode are not counted: %+v", sessions)
			}
			must(t, conn.Close())
			if locks := see.Locks(); len(locks) > 0 {
				t.Errorf("held: %v", locks)
			}
		})
	}
}

// A database without an encoding, and texts that are not UTF-8.
func TestSQLASCII(t *testing.T) {
	server := pgtest.Shared(t)
	name := strings.ToLower("ascii_" + rand.Text())
	must(t, server.Exec("postgres", "CREATE DATABASE "+name+" ENCODING 'SQL_ASCII' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"))
	t.Cleanup(func() { must(t, server.Exec("postgres", "DROP DATABASE "+name+" WITH (FORCE)")) })
	see := pgtest.Observe(t, server.DSN(name))
	script := func(driver string) (lines []string) {
		db := byName(driver)(t, server.DSN(name))
		defer db.Close()
		conn, err := db.Conn(t.Context())
		must(t, err)
		defer conn.Close()
		for _, query := range []string{
			"SELECT 'gr\xfc\xdfe'", "SELECT pg_try_advisory_lock(1) AS \"gr\xfc\xdfe\"", "/* \xff\xfe */ SELECT pg_advisory_lock(hashtext('\xff'))", "SELECT '\xffpg_advisory_lock(3)'",
			"DO $\xff$ BEGIN PERFORM pg_advisory_lock(4); END $\xff$", "SELECT pg_advisory_unlock(1) -- \xff",
		} {
			var got any
			rows, err := conn.QueryContext(t.Context(), query)
			if err == nil {
				columns, _ := rows.Columns()
				lines = append(lines, fmt.Sprintf("%q", columns))
				for rows.Next() {
					must(t, rows.Scan(&got))
				}
				err = rows.Err()
			}
			lines = append(lines, fmt.Sprintf("%q %T %q %v %d", query, got, got, err, len(see.Locks())))
		}
		return lines
	}
	compareScripts(t, script("pgx"), script("pgadvlock"))
	see.WaitFor(time.Second, "nothing is held", func(l []pgtest.Lock) bool { return len(l) == 0 })
	locksWork(t, open(t, server.DSN(name)), see)
}

// Errors of connecting are pgx's own.
func TestConnectErrors(t *testing.T) {
	server, name, _ := database(t)
	for _, dsn := range []string{
		fmt.Sprintf("postgres://postgres@127.0.0.1:%d/x?sslmode=disable&connect_timeout=2", deadPort(t)),
		server.DSN("no_such_database"), server.DSN(name) + "&user=nobody_such", server.DSN(name) + "&nonsense=1", server.DSN(name) + "&sslmode=nonsense",
		server.DSN(name) + "&options=-c%20nonsense%3D1", "nonsense", "host=",
	} {
		plain, wrapped := byName("pgx")(t, dsn), open(t, dsn)
		p, w := plain.PingContext(t.Context()), wrapped.PingContext(t.Context())
		plain.Close()
		if show(p) != show(w) {
			t.Errorf("%s:\n   plain: %s\nwrapped: %s", dsn, show(p), show(w))
		}
	}
}

// Wrappers inside that show what they wrap do not hide pgx, however many there
// are; what shows itself, or nothing, is taken for another driver.
func TestWrappersInside(t *testing.T) {
	server, name, see := database(t)
	base := func(t *testing.T) driver.Connector { return stdlib.GetConnector(*parse(t, server.DSN(name))) }
	for title, c := range map[string]struct {
		wrap  func(driver.Conn) driver.Conn
		shows bool
	}{
		"Raw":           {func(c driver.Conn) driver.Conn { return &rawConn{c} }, true},
		"WrappedConn":   {func(c driver.Conn) driver.Conn { return &wrappedConn{c} }, true},
		"three of them": {func(c driver.Conn) driver.Conn { return &rawConn{&wrappedConn{&rawConn{c}}} }, true},
		"hidden":        {func(c driver.Conn) driver.Conn { return &rawConn{struct{ driver.Conn }{c}} }, false},
		"nothing":       {func(c driver.Conn) driver.Conn { return nothingConn{c} }, false},
		"itself":        {func(c driver.Conn) driver.Conn { return selfConn{c} }, false},
		"no pgx":        {func(c driver.Conn) driver.Conn { return &rawConn{noPgx{c}} }, false},
	} {
		t.Run(title, func(t *testing.T) {
			opts := []pgadvlock.Option{pgadvlock.WithMaxWait(time.Minute)} // makes it ask and tell in more ways
			if !c.shows {
				opts = append(opts, pgadvlock.WithPoolMode(pgadvlock.PoolDirect))
			}
			db := wrap(t, wrappingConnector{base(t), c.wrap}, opts...)
			defer db.Close()
			db.SetMaxOpenConns(1)
			pids := map[int]bool{}
			for range 2 {
				conn, err := db.Conn(t.Context())
				must(t, err)
				var got bool
				must(t, conn.QueryRowContext(t.Context(), "SELECT pg_try_advisory_lock(42)").Scan(&got))
				exec(t, conn, "SELECT pg_advisory_lock($1)", 42)
				var pid int
				must(t, conn.QueryRowContext(t.Context(), "SELECT pg_backend_pid()").Scan(&pid))
				pids[pid] = true
				must(t, conn.Raw(func(raw any) error {
					mode, evidence, err := raw.(*pgadvlock.Conn).PoolMode(t.Context())
					if err != nil || mode != pgadvlock.PoolDirect {
						t.Errorf("pool mode %s, %s, %v", mode, evidence, err)
					}
					if shown := raw.(*pgadvlock.Conn).Conn(); (shown != nil) != c.shows || shown != nil && int(shown.PgConn().PID()) != pid {
						t.Errorf("Conn: %v", shown)
					}
					return nil
				}))
				must(t, conn.Close())
				if !got || see.Held(42) {
					t.Errorf("granted %t, still held %t", got, see.Held(42))
				}
			}
			if len(pids) != 1 {
				t.Error("the connection was not kept")
			}
			if !c.shows {
				return
			}
			// That it is closed is seen as well.
			see.Exec("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()")
			conn, err := db.Conn(t.Context())
			must(t, err)
			if _, err := conn.ExecContext(t.Context(), "SELECT 1"); err == nil {
				t.Error("no error")
			}
			_ = conn.Close()
			if n := db.Stats().OpenConnections; n != 0 {
				t.Error("a dead connection was kept")
			}
		})
	}
}

type wrappingConnector struct {
	driver.Connector
	wrap func(driver.Conn) driver.Conn
}

func (c wrappingConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return c.wrap(conn), nil
}

type (
	anyConn     = driver.Conn // so that the field is not named as a method is
	rawConn     struct{ anyConn }
	wrappedConn struct{ anyConn }
	nothingConn struct{ anyConn }
	selfConn    struct{ anyConn }
	noPgx       struct{ anyConn }
)

func (c *rawConn) Raw() driver.Conn             { return c.anyConn }
func (c *wrappedConn) WrappedConn() driver.Conn { return c.anyConn }
func (nothingConn) Raw() driver.Conn            { return nil }
func (c selfConn) Raw() driver.Conn             { return c }
func (noPgx) Conn() *pgx.Conn                   { return nil } // as pgadvlock's own over lib/pq
