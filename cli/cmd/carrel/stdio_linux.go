package main

import (
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// pipeSize is the size that pipes from and to ssh are set to, in bytes; the most that an unprivileged process may ask
// for by default (fs.pipe-max-size, pipe(7)).
const pipeSize = 1 << 20

// rawStdio gives stdin and stdout as plain file descriptors, with pipes made large.
func rawStdio() (io.Reader, io.Writer) {
	for _, f := range []*os.File{os.Stdin, os.Stdout} {
		_, _ = unix.FcntlInt(f.Fd(), unix.F_SETPIPE_SZ, pipeSize) // no pipe, or not allowed: as good
	}
	return rawFile(0), rawFile(1)
}

// rawFile reads and writes a blocking descriptor without the bookkeeping of os.File.
type rawFile int

func (f rawFile) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(int(f), p)
		switch {
		case err == unix.EINTR || err == unix.EAGAIN && f.wait(unix.POLLIN):
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (f rawFile) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := unix.Write(int(f), p[done:])
		switch {
		case err == unix.EINTR || err == unix.EAGAIN && f.wait(unix.POLLOUT):
		case err != nil:
			return done, err
		default:
			done += n
		}
	}
	return done, nil
}

// wait waits for a descriptor that somebody has made non-blocking.
func (f rawFile) wait(events int16) bool {
	_, err := unix.Poll([]unix.PollFd{{Fd: int32(f), Events: events}}, -1)
	return err == nil || err == unix.EINTR
}
