package session

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/sys/unix"
)

// command is one session channel and what runs on it.
type command struct {
	server *Server
	ch     ssh.Channel
	done   chan struct{} // closed when the command ended and all its output was sent

	// Set by requests, all before the start and by one goroutine.
	env       []string
	envBytes  int
	pty       *ptyRequest
	agentPath string
	started   bool
	openSSH   bool

	mu      sync.Mutex
	group   int // process group, which is also the first process's id; 0 before the start and once that process is reaped
	tty     *terminal
	pipes   []*os.File    // our ends of stdin, stdout and stderr
	hungUp  chan struct{} // closed when the client is gone
	isHung  bool
	outputs sync.WaitGroup
}

// runProcess runs a program to its end: exit status or signal sent, output drained.
func (c *command) runProcess(isExec bool, line string) {
	shell := loginShell(c.server.cfg.PasswdFile, c.server.cfg.Account)
	env := c.server.commandEnv(c.env, shell)
	if c.agentPath != "" {
		env = environ(env, []string{"SSH_AUTH_SOCK=" + c.agentPath})
	}
	prog, failed, status := c.resolveProgram(isExec, line, shell, env)
	if failed != "" {
		c.fail(failed, status)
		return
	}
	cmd := &exec.Cmd{Path: prog.path, Args: prog.args, Env: env, Dir: c.server.homeDir()}
	err := c.spawn(cmd)
	switch {
	case errors.Is(err, os.ErrNotExist):
		c.fail(prog.args[0]+": not found", exitNotFound)
	case err != nil:
		c.fail(fmt.Sprintf("cannot run %s: %v", prog.args[0], err), exitCannotRun)
	default:
		c.finish(cmd)
	}
}

func (c *command) fail(text string, status uint32) {
	c.tell(text)
	c.sendExit(status)
}

// tell writes one line of ours on the channel's standard error.
func (c *command) tell(text string) {
	end := "\n"
	if c.pty != nil {
		end = "\r\n"
	}
	_, _ = io.WriteString(c.ch.Stderr(), "carrel: "+text+end) // fails only when the client is gone
}

func (c *command) spawn(cmd *exec.Cmd) error {
	if c.pty != nil {
		return c.spawnOnTerminal(cmd)
	}
	return c.spawnOnPipes(cmd)
}

func (c *command) spawnOnPipes(cmd *exec.Cmd) error {
	var ours, theirs [3]*os.File
	closeSet := func(set [3]*os.File) {
		for _, f := range set {
			if f != nil {
				f.Close()
			}
		}
	}
	for i := range ours {
		r, w, err := os.Pipe()
		if err != nil {
			closeSet(ours)
			closeSet(theirs)
			return fmt.Errorf("make pipe: %w", err)
		}
		ours[i], theirs[i] = r, w
		if i == 0 {
			ours[i], theirs[i] = w, r
		}
		growPipe(w)
	}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs[0], theirs[1], theirs[2]
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err := c.launch(cmd, ours[:], nil)
	closeSet(theirs)
	if err != nil {
		closeSet(ours)
		return err
	}
	c.server.start(func() { c.copyInput(ours[0]) })
	c.copyOutput(ours[1], c.ch)
	c.copyOutput(ours[2], c.ch.Stderr())
	return nil
}

// launch starts cmd and notes its process group and our ends of its files, unless the connection has hung up already.
func (c *command) launch(cmd *exec.Cmd, pipes []*os.File, tty *terminal) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isHung {
		return errors.New("the connection has ended")
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	c.group, c.pipes = cmd.Process.Pid, pipes
	if tty != nil {
		tty.setSize(c.pty.size)
		c.tty = tty
	}
	return nil
}

// growPipe asks for 256 KiB, which saves system calls on bulk data; a refusal (the user's pipe quota) is fine.
func growPipe(f *os.File) {
	raw, err := f.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, 256<<10) })
}

// copyInput feeds the command until the client's end of file. When the command stops reading, an OpenSSH client is told,
// so that it stops sending.
func (c *command) copyInput(w *os.File) {
	_, err := io.CopyBuffer(struct{ io.Writer }{w}, c.ch, make([]byte, 32<<10))
	w.Close()
	if errors.Is(err, syscall.EPIPE) && c.openSSH {
		_, _ = c.ch.SendRequest("eow@openssh.com", false, nil)
	}
}

// copyOutput sends what r gives until its last writer is gone. When the client no longer takes it, the pipe is closed, and
// the command gets SIGPIPE.
func (c *command) copyOutput(r *os.File, to io.Writer) {
	c.outputs.Add(1)
	c.server.start(func() {
		defer c.outputs.Done()
		_, _ = io.CopyBuffer(to, struct{ io.Reader }{r}, make([]byte, 64<<10))
		r.Close()
	})
}

// finish waits for the end of the command, tells how it ended, and waits until its output is sent. The first process stays
// unreaped until then: so its process group's number cannot become someone else's while a signal may be sent to it.
func (c *command) finish(cmd *exec.Cmd) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := waitNoReap(cmd.Process.Pid); err != nil {
			c.server.log.Warn("wait for command", "err", err)
		}
	}()
	select {
	case <-ended:
	case <-c.hungUp:
		go func() { // outlives the connection when the program ignores SIGHUP, as it may
			<-ended
			c.reap(cmd)
		}()
		return
	}
	status := exitOf(cmd.Process.Pid)
	c.sendExitOf(status)
	c.closeInput()
	c.drain()
	c.reap(cmd)
}

func (c *command) reap(cmd *exec.Cmd) {
	c.mu.Lock()
	c.group = 0
	c.mu.Unlock()
	_ = cmd.Wait() // how it ended is known
}

// drain waits for the output: on pipes until their last writer is gone, on a terminal until it is empty.
func (c *command) drain() {
	if c.tty != nil {
		c.tty.drain(c.server.cfg.Limits.PTYQuiet)
	}
	c.outputs.Wait()
	if c.tty != nil {
		c.tty.close()
	}
}

func (c *command) closeInput() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pipes) > 0 {
		c.pipes[0].Close()
	}
}

// stopOutput closes the command's standard output: the client has nowhere to put it.
func (c *command) stopOutput() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.pipes) > 1 {
		c.pipes[1].Close()
	}
}

// hangUp is what happens when the client is gone: SIGHUP to the process group, as a terminal would do (SSH-31), and no more
// input or output. What ignores SIGHUP, or left the session (setsid), lives.
func (c *command) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.isHung {
		return
	}
	c.isHung = true
	close(c.hungUp)
	if c.group > 0 {
		_ = syscall.Kill(-c.group, syscall.SIGHUP)
		_ = syscall.Kill(-c.group, syscall.SIGCONT)
	}
	for _, f := range c.pipes {
		f.Close()
	}
	if c.tty != nil {
		c.tty.close()
	}
}

func (c *command) signal(payload []byte) bool {
	var msg struct{ Name string }
	if ssh.Unmarshal(payload, &msg) != nil {
		return false
	}
	sig, ok := signalByName(msg.Name)
	if !ok {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.group > 0 && syscall.Kill(-c.group, sig) == nil
}

func waitNoReap(pid int) error {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// exitOf reads how an ended, unreaped child ended.
func exitOf(pid int) siginfo {
	var info unix.Siginfo
	for {
		err := unix.Waitid(unix.P_PID, pid, &info, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return parseSiginfo(&info)
		}
	}
}

func (c *command) sendExit(status uint32) {
	_, _ = c.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{status}))
}

func (c *command) sendExitOf(info siginfo) {
	if info.signal == 0 {
		c.sendExit(uint32(info.status))
		return
	}
	_, _ = c.ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
		Name       string
		CoreDumped bool
		Message    string
		Language   string
	}{signalName(info.signal), info.core, "", ""}))
}

// typed reports typing at most once a second.
type typed struct {
	last   time.Time
	report func()
}

func (t *typed) note(now time.Time) {
	if t.report != nil && now.Sub(t.last) >= time.Second {
		t.last = now
		t.report()
	}
}
