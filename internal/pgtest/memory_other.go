//go:build unix && !linux

package pgtest

func tempParents() []string { return nil }
