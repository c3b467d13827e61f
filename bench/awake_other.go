//go:build !linux

package main

// keepAwake does nothing: see awake_linux.go.
func keepAwake() (sleep func() error, err error) { return func() error { return nil }, nil }
