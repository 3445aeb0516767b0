package session

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"
)

// drainBytes is the most that is still sent from a terminal after its first process ended, while background jobs hold it: more
// than the kernel keeps of what that process wrote, so that a job which writes for ever does not hold the session.
const drainBytes = 256 << 10

// ptyRequest is what a client asked of its terminal.
type ptyRequest struct {
	term  string
	size  unix.Winsize
	modes []byte
}

func parsePTY(payload []byte) (ptyRequest, bool) {
	var msg struct {
		Term                         string
		Columns, Rows, Width, Height uint32
		Modes                        string
	}
	if ssh.Unmarshal(payload, &msg) != nil || len(msg.Term) > 256 {
		return ptyRequest{}, false
	}
	return ptyRequest{msg.Term, winsize(msg.Columns, msg.Rows, msg.Width, msg.Height), []byte(msg.Modes)}, true
}

func winsize(columns, rows, width, height uint32) unix.Winsize {
	clamp := func(n uint32) uint16 { return uint16(min(n, 0xffff)) }
	return unix.Winsize{Col: clamp(columns), Row: clamp(rows), Xpixel: clamp(width), Ypixel: clamp(height)}
}

// terminal is the master side of a pseudo terminal.
type terminal struct {
	master   *os.File
	quiet    atomic.Int64 // while draining: how long silence may last, ns
	drained  int
	name     string
	isClosed atomic.Bool
}

// openTerminal makes a pair. The slave belongs to the caller's uid: the kernel's devpts takes it from the opener.
func openTerminal() (*terminal, *os.File, error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open /dev/ptmx: %w", err)
	}
	t := &terminal{master: os.NewFile(uintptr(fd), "/dev/ptmx")}
	slave, err := t.slave(fd)
	if err != nil {
		t.master.Close()
		return nil, nil, err
	}
	return t, slave, nil
}

func (t *terminal) slave(fd int) (*os.File, error) {
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, fmt.Errorf("unlock terminal: %w", err)
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, fmt.Errorf("number of terminal: %w", err)
	}
	t.name = "/dev/pts/" + strconv.Itoa(n)
	// By number of the pair, not by path: /dev/pts may be mounted over.
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC)
	if errno == 0 {
		return os.NewFile(peer, t.name), nil
	}
	slave, err := os.OpenFile(t.name, os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, fmt.Errorf("open terminal: %w", err)
	}
	return slave, nil
}

func (t *terminal) setSize(size unix.Winsize) bool {
	raw, err := t.master.SyscallConn()
	if err != nil {
		return false
	}
	ok := false
	_ = raw.Control(func(fd uintptr) { ok = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &size) == nil })
	return ok
}

func (t *terminal) close() {
	if t.isClosed.CompareAndSwap(false, true) {
		t.master.Close()
	}
}

// drain makes reads end when nothing has come for quiet.
func (t *terminal) drain(quiet time.Duration) {
	t.quiet.Store(int64(quiet))
	_ = t.master.SetReadDeadline(time.Now().Add(quiet))
}

// Read gives io.EOF when every process has closed the terminal (EIO from the kernel), and when draining is over.
func (t *terminal) Read(b []byte) (int, error) {
	quiet := time.Duration(t.quiet.Load())
	if quiet > 0 {
		if t.drained > drainBytes {
			return 0, io.EOF
		}
		_ = t.master.SetReadDeadline(time.Now().Add(quiet))
	}
	n, err := t.master.Read(b)
	if quiet > 0 {
		t.drained += n
	}
	if errors.Is(err, syscall.EIO) || errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, os.ErrClosed) {
		err = io.EOF
	}
	return n, err
}

func (c *command) spawnOnTerminal(cmd *exec.Cmd) error {
	t, slave, err := openTerminal()
	if err != nil {
		return err
	}
	defer slave.Close()
	if err := applyModes(slave, c.pty.modes); err != nil {
		c.server.log.Debug("terminal modes", "err", err)
	}
	t.setSize(c.windowSize())
	cmd.Stdin, cmd.Stdout, cmd.Stderr = slave, slave, slave
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Ctty: 0}
	cmd.Env = environ(cmd.Env, []string{"TERM=" + c.pty.term, "SSH_TTY=" + t.name})
	if err := c.launch(cmd, nil, t); err != nil {
		t.close()
		return err
	}
	c.server.start(func() { c.copyTyped(t) })
	c.outputs.Add(1)
	c.server.start(func() {
		defer c.outputs.Done()
		_, _ = io.CopyBuffer(c.ch, struct{ io.Reader }{t}, make([]byte, 32<<10))
		t.close() // the client no longer takes it: the terminal hangs up
	})
	return nil
}

func (c *command) windowSize() unix.Winsize {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pty.size
}

// copyTyped writes what the client sends to the terminal. The client's end of file closes nothing, as with OpenSSH: there is
// no half-closed terminal.
func (c *command) copyTyped(t *terminal) {
	note := typed{report: c.server.cfg.OnTyped}
	buf := make([]byte, 4<<10)
	for {
		n, err := c.ch.Read(buf)
		if n > 0 {
			note.note(time.Now())
			if _, err := t.master.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (c *command) resize(payload []byte) bool {
	var msg struct{ Columns, Rows, Width, Height uint32 }
	if ssh.Unmarshal(payload, &msg) != nil || c.pty == nil {
		return false
	}
	size := winsize(msg.Columns, msg.Rows, msg.Width, msg.Height)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.pty.size = size
	return c.tty == nil || c.tty.setSize(size)
}
