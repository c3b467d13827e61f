package pgtest

// This file owns how a server comes up: initdb, postgres, its roles, PgBouncer.
// Half a second in memory, a second on disk; most of it is initdb's.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// startTimeout bounds the start of one server, on a machine that has much else to do.
const startTimeout = time.Minute

// boot makes the data directory and starts all of the server in the sandbox.
func (s *Server) boot() error {
	if err := s.sandbox.run(filepath.Join(s.bin, "initdb"), "-D", s.sandbox.path("data"), "-U", "postgres", "-A", "trust",
		"-E", "UTF8", "--locale=C", "--no-sync", "--wal-segsize=1"); err != nil {
		return err
	}
	if err := onFreePort(s.startPostgres); err != nil {
		return err
	}
	version, err := serverVersion(s.DSN("postgres"))
	if err != nil {
		return err
	}
	s.version = version
	if err := s.Exec("postgres", bouncerRoles()); err != nil {
		return err
	}
	if s.bouncerPath == "" {
		return nil
	}
	s.bouncer, err = s.startBouncer(nil)
	return err
}

// startPostgres starts postgres on the data directory, and waits until it
// answers on its socket: on the port somebody else might.
func (s *Server) startPostgres(port int) error {
	s.port = port
	args := []string{"-D", s.sandbox.path("data"), "-h", s.host, "-p", strconv.Itoa(port), "-k", s.sandbox.dir, "-F"}
	for _, setting := range slices.Concat([]string{
		"synchronous_commit=off", "full_page_writes=off", "wal_level=minimal", "max_wal_senders=0", "autovacuum=off",
		"jit=off", "shared_buffers=32MB", "max_connections=300", "log_line_prefix=%m [%p] %q%u@%d ",
		"dynamic_shared_memory_type=mmap", // in the data directory, so that it goes with it, even after a KILL
	}, s.conf) {
		args = append(args, "-c", setting)
	}
	p, err := s.sandbox.start("postgres", syscall.SIGQUIT, filepath.Join(s.bin, "postgres"), args...)
	if err != nil {
		return err
	}
	s.postgres = p
	return p.waitReady(s.SocketDSN("postgres"), "")
}

// waitReady waits until the process answers the query at the DSN. It ends the process if it does not.
func (p *process) waitReady(dsn, sql string) error {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	for {
		err := ping(ctx, dsn, sql)
		if err == nil {
			return nil
		}
		if p.exited() {
			return fmt.Errorf("pgtest: %s ended at its start:\n%s", p.name, p.failure())
		}
		if ctx.Err() != nil {
			return errors.Join(fmt.Errorf("pgtest: %s is not ready after %s: %w\n%s", p.name, startTimeout, err, p.failure()), p.stop(syscall.SIGKILL))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func ping(ctx context.Context, dsn, sql string) error {
	conn, err := pgconn.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, sql).ReadAll()
	return err
}

// addressInUse is a part of how servers say that, in capitals or not.
const addressInUse = "ddress already in use"

// onFreePort calls start with ports that look free until it does not fail over
// an address in use. They are below the range that systems hand out to outgoing
// connections (from 32768 on Linux), where a port that looks free may be taken,
// by some client, before the server has it, or between its stop and restart.
func onFreePort(start func(port int) error) error {
	var err error
	for range 20 {
		port := 20000 + rand.IntN(12768)
		l, lerr := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if lerr != nil {
			err = lerr
			continue
		}
		l.Close()
		if err = start(port); err == nil || !strings.Contains(err.Error(), addressInUse) {
			return err
		}
	}
	return fmt.Errorf("pgtest: no free port: %w", err)
}
