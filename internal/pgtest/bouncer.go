package pgtest

// This file owns PgBouncer. Its pool mode can be set per user, so one process
// serves every database in every mode, and the user in the DSN chooses.

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
)

// bouncerUsers maps pool modes to the superusers whose they are.
var bouncerUsers = map[string]string{"session": "app_sess", "transaction": "app_tx", "statement": "app_stmt"}

// Bouncer is a running PgBouncer.
type Bouncer struct {
	server  *Server
	process *process
	dir     string // of its configuration and socket
	port    int
}

var errNoBouncer = fmt.Errorf("pgtest: PgBouncer %w: run make setup, or set PGADVLOCK_TEST_PGBOUNCER", errNotFound)

// HasBouncer says whether there is a PgBouncer in front of the server.
func (s *Server) HasBouncer() bool { return s.bouncer != nil }

// RequireBouncer skips the test when there is no PgBouncer in front of the server.
func (s *Server) RequireBouncer(tb testing.TB) {
	tb.Helper()
	switch {
	case s.external != "":
		tb.Skip(errExternal)
	case s.bouncer == nil:
		require(tb, errNoBouncer)
	}
}

// BouncerDSN is the URL of a database through the server's PgBouncer in the
// given pool mode: "session", "transaction" or "statement". It panics where
// [Server.RequireBouncer] would have skipped the test.
func (s *Server) BouncerDSN(db, mode string) string { return s.bouncer.DSN(db, mode) }

// Bouncer starts another PgBouncer in front of the server, for this test alone.
// Each element of conf is a setting of its section [pgbouncer], as "name=value",
// beside or instead of ours. With listen_port, several processes can share a
// port (so_reuseport=1). It skips the test as [Server.RequireBouncer] does.
func (s *Server) Bouncer(tb testing.TB, conf ...string) *Bouncer {
	tb.Helper()
	s.RequireBouncer(tb)
	b, err := s.startBouncer(conf)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(b.Kill)
	return b
}

// DSN is the URL of a database in the given pool mode: "session", "transaction" or "statement".
func (b *Bouncer) DSN(db, mode string) string {
	user, ok := bouncerUsers[mode]
	if !ok {
		panic(fmt.Sprintf("pgtest: pool mode %q: want session, transaction or statement", mode))
	}
	return tcpDSN(user, b.server.host, b.port, db)
}

// Port is PgBouncer's TCP port.
func (b *Bouncer) Port() int { return b.port }

// PID is its process id, for [Freeze].
func (b *Bouncer) PID() int { return b.process.pid }

// Kill ends it at once. Its clients see their connections break.
func (b *Bouncer) Kill() { b.process.stop(syscall.SIGKILL) }

// Log is what it has logged so far.
func (b *Bouncer) Log() string { return b.process.output(0) }

// Console runs a command of its admin console, such as "PAUSE" or "SHOW POOLS",
// and returns the rows as text.
func (b *Bouncer) Console(command string) ([][]string, error) {
	return query(socketDSN("postgres", b.dir, b.port, "pgbouncer"), command)
}

// Reload changes settings while it runs, as [Server.Bouncer] takes them.
func (b *Bouncer) Reload(conf ...string) error {
	if err := b.configure(conf); err != nil {
		return err
	}
	_, err := b.Console("RELOAD")
	return err
}

func bouncerRoles() string {
	var sql strings.Builder
	for _, user := range bouncerUsers {
		fmt.Fprintf(&sql, "CREATE ROLE %s LOGIN SUPERUSER;", user)
	}
	return sql.String()
}

var bouncerSeq atomic.Int64 // names their directories

func (s *Server) startBouncer(conf []string) (*Bouncer, error) {
	name := "pgbouncer" + strconv.FormatInt(bouncerSeq.Add(1), 10)
	b := &Bouncer{server: s, dir: s.sandbox.path(name)}
	if err := s.sandbox.mkdir(b.dir); err != nil {
		return nil, err
	}
	start := func(port int) error {
		b.port = port
		if err := b.configure(conf); err != nil {
			return err
		}
		p, err := s.sandbox.start(name, syscall.SIGKILL, s.bouncerPath, b.dir+"/pgbouncer.ini")
		if err != nil {
			return err
		}
		b.process = p
		if err := p.waitReady(socketDSN("postgres", b.dir, b.port, "pgbouncer"), "SHOW VERSION"); err != nil {
			return err
		}
		if log := p.failure(); strings.Contains(log, addressInUse) { // its socket is enough for it to go on
			return errors.Join(fmt.Errorf("pgtest: %s:\n%s", name, log), p.stop(syscall.SIGKILL))
		}
		return nil
	}
	for _, setting := range conf {
		if text, ok := strings.CutPrefix(setting, "listen_port="); ok {
			port, err := strconv.Atoi(text)
			if err != nil {
				return nil, err
			}
			return b, start(port)
		}
	}
	return b, onFreePort(start)
}

// configure writes PgBouncer's files.
func (b *Bouncer) configure(conf []string) error {
	settings := map[string]string{
		"listen_addr":               b.server.host,
		"listen_port":               strconv.Itoa(b.port),
		"unix_socket_dir":           b.dir,
		"auth_type":                 "trust",
		"auth_file":                 b.dir + "/userlist.txt",
		"admin_users":               "postgres",
		"max_client_conn":           "1000",
		"default_pool_size":         "10",
		"server_login_retry":        "1", // seconds; after 15, the default, a test is over
		"ignore_startup_parameters": "extra_float_digits",
	}
	for _, setting := range conf {
		name, value, ok := strings.Cut(setting, "=")
		if !ok {
			return fmt.Errorf("pgtest: PgBouncer setting %q: want name=value", setting)
		}
		settings[strings.TrimSpace(name)] = value
	}
	var ini, userlist strings.Builder
	fmt.Fprintf(&ini, "[databases]\n* = host=%s port=%d\n[users]\n", b.server.host, b.server.port)
	userlist.WriteString("\"postgres\" \"\"\n")
	for mode, user := range bouncerUsers {
		fmt.Fprintf(&ini, "%s = pool_mode=%s\n", user, mode)
		fmt.Fprintf(&userlist, "%q \"\"\n", user)
	}
	ini.WriteString("[pgbouncer]\n")
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&ini, "%s = %s\n", name, settings[name])
	}
	return errors.Join(
		os.WriteFile(b.dir+"/pgbouncer.ini", []byte(ini.String()), 0o644),
		os.WriteFile(b.dir+"/userlist.txt", []byte(userlist.String()), 0o644))
}
