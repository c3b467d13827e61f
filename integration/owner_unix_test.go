//go:build unix

package integration

import (
	"os"
	"syscall"
	"testing"
)

// ownAs gives a file to the owner of another: the server reads no key that
// somebody else could write.
func ownAs(t *testing.T, file, like string) {
	t.Helper()
	info, err := os.Stat(like)
	must(t, err)
	owner := info.Sys().(*syscall.Stat_t)
	must(t, os.Chown(file, int(owner.Uid), int(owner.Gid)))
}
