//go:build !unix

package pgtest

// This file stands in for sandbox_unix.go where there are no Unix processes:
// nothing is started, and only PGADVLOCK_TEST_DSN works.

import (
	"errors"
	"path/filepath"
	"syscall"
)

var errNotUnix = errors.New("pgtest: servers are started on Unix only: set PGADVLOCK_TEST_DSN")

type sandbox struct{ dir string }

type process struct {
	name string
	pid  int
}

func newSandbox() (*sandbox, error)            { return nil, errNotUnix }
func (b *sandbox) close() error                { return errNotUnix }
func (b *sandbox) path(name string) string     { return filepath.Join(b.dir, name) }
func (b *sandbox) mkdir(string) error          { return errNotUnix }
func (b *sandbox) run(string, ...string) error { return errNotUnix }

func (b *sandbox) start(string, syscall.Signal, string, ...string) (*process, error) {
	return nil, errNotUnix
}

func (p *process) exited() bool              { return true }
func (p *process) stop(syscall.Signal) error { return errNotUnix }
func (p *process) output(int) string         { return "" }
func (p *process) failure() string           { return "" }

func freeze(int) error { return errNotUnix }
func thaw(int) error   { return errNotUnix }
