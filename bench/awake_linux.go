package main

// This file owns the processors' sleep. One that has nothing to do is halted, in a
// virtual machine by its host, and to wake it up for an answer takes longer than
// the statement did, and not always equally long: pgx with two microseconds of
// counting between its statements was faster by a tenth than without. So each
// processor gets something to do, at the one priority that gives way to everything
// else, SCHED_IDLE.

import (
	"errors"
	"io"
	"os"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

const spinning = "PGADVLOCK_BENCH_SPINNING"

func init() {
	if os.Getenv(spinning) == "" {
		return
	}
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin) // ends with the program that started this one, however that ends
		os.Exit(0)
	}()
	runtime.LockOSThread()
	if err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0); err != nil {
		os.Exit(1)
	}
	for {
	}
}

// keepAwake keeps all processors awake until sleep is called.
func keepAwake() (sleep func() error, err error) {
	var ends []func() error
	sleep = func() (err error) {
		for _, end := range ends {
			err = errors.Join(err, end())
		}
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	for range runtime.NumCPU() {
		spin := exec.Command(self)
		spin.Env = append(os.Environ(), spinning+"=1")
		stdin, err := spin.StdinPipe()
		if err == nil {
			err = spin.Start()
		}
		if err != nil {
			return nil, errors.Join(err, sleep())
		}
		ends = append(ends, func() error { return errors.Join(stdin.Close(), spin.Wait()) })
	}
	return sleep, nil
}
