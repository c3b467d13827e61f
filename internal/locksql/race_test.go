//go:build race

package locksql

func init() { raced = true }
