package session

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/crypto/ssh"

	"github.com/carrel-dev/carrel/agent/initd/sftp"
)

// noShell is what a shell request gets in an image without one.
const noShell = "this image has no shell; exec and sftp still work"

// Exit statuses of POSIX shells for a command that cannot be run, and for one that is not there.
const (
	exitCannotRun = 126
	exitNotFound  = 127
)

// serveSession accepts one session channel and answers its requests until its command ended and the client closed it.
func (s *Server) serveSession(ctx context.Context, conn *ssh.ServerConn, nc ssh.NewChannel) {
	ch, requests, err := nc.Accept()
	if err != nil {
		return // the connection is gone
	}
	c := &command{server: s, ch: ch, done: make(chan struct{}), hungUp: make(chan struct{})}
	if !s.addCommand(c) {
		ch.Close()
		ssh.DiscardRequests(requests)
		return
	}
	defer s.removeCommand(c)
	for open := true; open; {
		select {
		case req, ok := <-requests:
			if !ok { // closed by the client, or the connection is gone
				c.hangUp()
				open = false
				break
			}
			c.answer(ctx, conn, req)
		case <-c.done:
			open = false
		}
	}
	ch.Close()
	if c.started {
		<-c.done
	}
	// Until the client has closed its side too, the channel counts, so that none can be piled up.
	ssh.DiscardRequests(requests)
}

func (s *Server) addCommand(c *command) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return false
	}
	s.commands[c] = struct{}{}
	return true
}

func (s *Server) removeCommand(c *command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.commands, c)
}

// answer does what one channel request asks and replies when that is wanted.
func (c *command) answer(ctx context.Context, conn *ssh.ServerConn, req *ssh.Request) {
	ok, after := false, func() {}
	switch req.Type {
	case "env":
		ok = c.setEnv(req.Payload)
	case "pty-req":
		ok = c.requestPTY(req.Payload)
	case "window-change":
		ok = c.resize(req.Payload)
	case "signal":
		ok = c.signal(req.Payload)
	case "auth-agent-req@openssh.com":
		ok = c.forwardAgent(ctx, conn)
	case "eow@openssh.com":
		c.stopOutput()
		ok = true
	case "shell", "exec", "subsystem":
		ok, after = c.begin(conn, req)
	}
	if req.WantReply {
		_ = req.Reply(ok, nil) // fails only when the connection is gone
	}
	after()
}

func (c *command) setEnv(payload []byte) bool {
	var msg struct{ Name, Value string }
	if ssh.Unmarshal(payload, &msg) != nil || c.started || !acceptsEnv(msg.Name) || strings.ContainsRune(msg.Value, 0) {
		return false
	}
	if len(c.env) >= maxClientVars || c.envBytes+len(payload) > maxClientBytes {
		return false
	}
	c.envBytes += len(payload)
	c.env = append(c.env, msg.Name+"="+msg.Value)
	return true
}

func (c *command) requestPTY(payload []byte) bool {
	req, ok := parsePTY(payload)
	if !ok || c.started || c.pty != nil {
		return false
	}
	c.pty = &req
	return true
}

func (c *command) forwardAgent(ctx context.Context, conn *ssh.ServerConn) bool {
	if c.started {
		return false
	}
	path, err := c.server.agent.open(ctx, c.server, conn)
	if err != nil {
		c.server.log.Warn("agent forwarding refused", "err", err)
		return false
	}
	c.agentPath = path
	return true
}

// begin decides what a shell, exec or subsystem request runs. What it returns runs after the reply has been sent, so that
// no output comes before it.
func (c *command) begin(conn *ssh.ServerConn, req *ssh.Request) (bool, func()) {
	if c.started {
		return false, func() {}
	}
	var arg struct{ Text string }
	if req.Type != "shell" {
		if ssh.Unmarshal(req.Payload, &arg) != nil || strings.ContainsRune(arg.Text, 0) {
			return false, func() {}
		}
	}
	if req.Type == "subsystem" && arg.Text != "sftp" {
		return false, func() {}
	}
	c.started = true
	c.openSSH = strings.Contains(string(conn.ClientVersion()), "OpenSSH")
	run := c.runSFTP
	if req.Type != "subsystem" {
		run = func() { c.runProcess(req.Type == "exec", arg.Text) }
	}
	return true, func() {
		c.server.start(func() {
			defer close(c.done)
			run()
		})
	}
}

func (c *command) runSFTP() {
	err := sftp.New(c.ch, c.server.homeDir()).Serve()
	status := uint32(0)
	if err != nil {
		c.server.log.Debug("sftp ended", "err", err)
		status = 1
	}
	c.sendExit(status)
}

// homeDir is where every command, SFTP and relative forward path starts (SSH-10): the home, or / when it is not there.
func (s *Server) homeDir() string {
	if info, err := os.Stat(s.cfg.Account.Home); err == nil && info.IsDir() {
		return s.cfg.Account.Home
	}
	return "/"
}

// program is what one command executes.
type program struct {
	path string
	args []string
}

// resolveProgram gives the program for a shell (line ignored) or exec request; failed says why there is none, with its status.
func (c *command) resolveProgram(isExec bool, line, shell string, env []string) (p program, failed string, status uint32) {
	switch {
	case shell != "" && isExec:
		return program{shell, []string{filepath.Base(shell), "-c", line}}, "", 0
	case shell != "":
		return program{shell, []string{"-" + filepath.Base(shell)}}, "", 0
	case !isExec:
		return program{}, noShell, exitNotFound
	}
	words, err := splitWords(line)
	if err != nil {
		return program{}, err.Error(), exitCannotRun
	}
	if len(words) == 0 {
		return program{}, "no command given, and " + noShell, exitNotFound
	}
	path := lookPath(words[0], env)
	if path == "" {
		return program{}, fmt.Sprintf("%s: not found (this image has no shell: the command was split at its spaces)", words[0]), exitNotFound
	}
	return program{path, words}, "", 0
}

func lookPath(name string, env []string) string {
	if strings.Contains(name, "/") {
		return name
	}
	at := slices.IndexFunc(env, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") })
	if at < 0 {
		return ""
	}
	for _, dir := range filepath.SplitList(strings.TrimPrefix(env[at], "PATH=")) {
		if path := filepath.Join(dir, name); executable(path) {
			return path
		}
	}
	return ""
}
