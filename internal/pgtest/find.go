package pgtest

// This file owns where the servers' programs are found. Debian keeps PostgreSQL's
// out of PATH, and PgBouncer in a sbin that ordinary users do not have there.

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

var postgresDirs = []string{
	"/usr/lib/postgresql/*/bin",                               // Debian, Ubuntu
	"/usr/pgsql-*/bin",                                        // PGDG on Red Hat and kin
	"/opt/homebrew/opt/postgresql@*/bin",                      // Homebrew on arm64
	"/usr/local/opt/postgresql@*/bin",                         // Homebrew on x86-64
	"/Applications/Postgres.app/Contents/Versions/[0-9]*/bin", // "latest" is a link to one of them
	"/usr/lib/postgresql*/bin",                                // Alpine, SUSE
}

var bouncerPaths = []string{
	"/usr/sbin/pgbouncer",
	"/usr/local/sbin/pgbouncer",
	"/opt/homebrew/bin/pgbouncer",
	"/usr/local/bin/pgbouncer",
}

// findPostgres returns the directory of initdb and postgres, of the newest version found.
func findPostgres() (string, error) {
	complete := func(dir string) bool {
		return isFile(filepath.Join(dir, "initdb")) && isFile(filepath.Join(dir, "postgres"))
	}
	if dir := os.Getenv("PGADVLOCK_TEST_PGBIN"); dir != "" {
		if !complete(dir) {
			return "", fmt.Errorf("pgtest: PGADVLOCK_TEST_PGBIN=%s: no initdb and postgres in it", dir)
		}
		return filepath.Abs(dir) // they run in another directory
	}
	var dirs []string
	for _, pattern := range postgresDirs {
		found, _ := filepath.Glob(pattern)
		dirs = append(dirs, found...)
	}
	slices.SortStableFunc(dirs, func(a, b string) int { return majorVersion(b) - majorVersion(a) })
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	for _, dir := range dirs {
		if complete(dir) {
			return dir, nil
		}
	}
	return "", fmt.Errorf("pgtest: PostgreSQL %w: run make setup, or set PGADVLOCK_TEST_PGBIN or PGADVLOCK_TEST_DSN", errNotFound)
}

// majorVersion reads it from the directory's name: 15 from /usr/lib/postgresql/15/bin,
// 16 from /opt/homebrew/opt/postgresql@16/bin.
func majorVersion(dir string) int {
	name := strings.TrimLeft(filepath.Base(filepath.Dir(dir)), "abcdefghijklmnopqrstuvwxyz@-")
	name, _, _ = strings.Cut(name, ".")
	n, _ := strconv.Atoi(name)
	return n
}

// findBouncer returns PgBouncer's program, or "" when it is not installed.
func findBouncer() (string, error) {
	if path := os.Getenv("PGADVLOCK_TEST_PGBOUNCER"); path != "" {
		if !isFile(path) {
			return "", fmt.Errorf("pgtest: PGADVLOCK_TEST_PGBOUNCER=%s: no such program", path)
		}
		return filepath.Abs(path) // it runs in another directory
	}
	if path, err := exec.LookPath("pgbouncer"); err == nil {
		return path, nil
	}
	if i := slices.IndexFunc(bouncerPaths, isFile); i >= 0 {
		return bouncerPaths[i], nil
	}
	return "", nil
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}
