package initd

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carrel-dev/carrel/agent/initd/control"
)

// DefaultGrace is the time between the first signal of a stop and SIGKILL, when neither flag nor agent says otherwise. It is
// less than the 10 s after which Docker itself kills.
const DefaultGrace = 8 * time.Second

// Descriptors that serve inherits, by number.
const (
	fdEnviron    = 3 // the image's environment, NUL-separated
	fdReceive    = 4 // serve's end of the rendezvous
	fdSummon     = 5 // the sessions' end
	fdOrders     = 6 // serve writes stop orders to init
	envFDFlag    = "--env-fd"
	maxRestart   = 2 * time.Second
	minRestart   = 20 * time.Millisecond
	steadyAfter  = 10 * time.Second // a serve that lived this long starts anew without delay
	hangUpPart   = 4                // SIGHUP has the first quarter of the grace
	defaultUmask = 0o022
)

// runtimeEnv is the environment of carrel-init's own processes: nothing of the image's reaches their Go runtime.
func runtimeEnv() []string {
	return []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "GOTRACEBACK=single"}
}

type initOptions struct {
	link  string
	grace time.Duration
	envFD int
}

// initMain is process 1: it reaps, keeps serve running, and ends everything when asked.
func initMain(args []string, log *slog.Logger) int {
	var o initOptions
	flags := flag.NewFlagSet("init", flag.ContinueOnError)
	flags.StringVar(&o.link, "link", DefaultLink, "the agent's address, as KIND:ADDRESS")
	flags.DurationVar(&o.grace, "grace", DefaultGrace, "time from the first signal of a stop to SIGKILL")
	flags.IntVar(&o.envFD, strings.TrimLeft(envFDFlag, "-"), 0, "internal")
	if err := flags.Parse(args); err != nil {
		return exitUsage
	}
	if o.envFD == 0 {
		log.Error("start again with our own environment", "err", reexec(args)) // returns only on failure
		return exitFailed
	}
	in, err := newInit(o, log)
	if err != nil {
		log.Error("start", "err", err)
		return exitFailed
	}
	return in.run()
}

// reexec puts the environment aside in a sealed file in memory and begins again without it.
func reexec(args []string) error {
	fd, err := unix.MemfdCreate("environ", unix.MFD_ALLOW_SEALING) // stays open over exec
	if err != nil {
		return fmt.Errorf("file for the environment: %w", err)
	}
	for data := []byte(strings.Join(os.Environ(), "\x00")); len(data) > 0; {
		n, err := unix.Write(fd, data)
		if err != nil {
			return fmt.Errorf("keep the environment: %w", err)
		}
		data = data[n:]
	}
	seals := unix.F_SEAL_WRITE | unix.F_SEAL_SHRINK | unix.F_SEAL_GROW | unix.F_SEAL_SEAL
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals); err != nil {
		return fmt.Errorf("seal the environment: %w", err)
	}
	argv := append([]string{"carrel-init", "init", envFDFlag, strconv.Itoa(fd)}, args...)
	return syscall.Exec("/proc/self/exe", argv, runtimeEnv())
}

// supervisor is the init role's state. One goroutine, run, owns all of it.
type supervisor struct {
	log        *slog.Logger
	link       string
	grace      time.Duration
	environ    int
	receive    *os.File
	summon     *os.File
	orderRead  *os.File
	orderWrite *os.File

	serve   int // process id; 0 while it does not run
	started time.Time
	delay   time.Duration
}

func newInit(o initOptions, log *slog.Logger) (*supervisor, error) {
	unix.Umask(defaultUmask)
	if err := os.MkdirAll(RunDir, 0o755); err != nil {
		return nil, fmt.Errorf("make %s: %w", RunDir, err)
	}
	protectFromOOM(log)
	s := &supervisor{log: log, link: o.link, grace: o.grace, environ: o.envFD}
	var err error
	if s.receive, s.summon, err = control.Rendezvous(); err != nil {
		return nil, err
	}
	if s.orderRead, s.orderWrite, err = os.Pipe(); err != nil {
		return nil, fmt.Errorf("pipe for orders: %w", err)
	}
	return s, nil
}

// protectFromOOM asks the kernel to spare process 1; it needs CAP_SYS_RESOURCE, which a container seldom has. Sessions undo it.
func protectFromOOM(log *slog.Logger) {
	if err := os.WriteFile("/proc/self/oom_score_adj", []byte("-900"), 0); err != nil {
		log.Debug("not protected from running out of memory", "err", err)
	}
}

// order is serve's word that a stop was asked for, with its grace.
type order struct{ grace time.Duration }

func (s *supervisor) run() int {
	signals := make(chan os.Signal, 64)
	// Every one, so that none ends us by Go's default; SIGURG is the runtime's own.
	signal.Notify(signals)
	signal.Reset(syscall.SIGURG)
	orders := make(chan order)
	go s.readOrders(orders) // ends with the process
	restart := time.NewTimer(0)
	for {
		select {
		case <-restart.C:
			s.startServe(restart)
		case sig := <-signals:
			switch sig {
			case syscall.SIGCHLD:
				if s.reap() {
					s.planRestart(restart)
				}
			case syscall.SIGTERM, syscall.SIGINT:
				s.log.Info("stop", "signal", sig.String(), "grace", s.grace)
				return s.stop(signals, s.grace)
			}
		case o := <-orders:
			s.log.Info("stop, by the agent", "grace", o.grace)
			return s.stop(signals, o.grace)
		}
	}
}

func (s *supervisor) readOrders(orders chan<- order) {
	buf := make([]byte, 64)
	for {
		n, err := s.orderRead.Read(buf)
		if err != nil {
			return
		}
		line, _, _ := bytes.Cut(buf[:n], []byte("\n"))
		if grace, err := time.ParseDuration(string(line)); err == nil {
			orders <- order{grace}
		}
	}
}

// startServe forks serve. It is never waited for by name: reap sees its end among all others, so no status is taken away.
func (s *supervisor) startServe(restart *time.Timer) {
	null, err := os.Open(os.DevNull)
	if err != nil {
		s.log.Error("start serve", "err", err)
		s.planRestart(restart)
		return
	}
	defer null.Close()
	pid, err := syscall.ForkExec("/proc/self/exe", []string{"carrel-init", "serve", "--link", s.link}, &syscall.ProcAttr{
		Dir: "/",
		Env: runtimeEnv(),
		Files: []uintptr{
			null.Fd(), os.Stdout.Fd(), os.Stderr.Fd(), uintptr(s.environ), s.receive.Fd(), s.summon.Fd(),
			s.orderWrite.Fd(),
		},
	})
	s.started = time.Now()
	if err != nil {
		s.log.Error("start serve", "err", err)
		s.planRestart(restart)
		return
	}
	s.serve = pid
}

// planRestart waits longer each time that serve ends soon after its start.
func (s *supervisor) planRestart(restart *time.Timer) {
	if time.Since(s.started) >= steadyAfter {
		s.delay = 0
	}
	restart.Reset(s.delay)
	s.delay = min(max(2*s.delay, minRestart), maxRestart)
}

// reap takes every ended child's status and tells whether serve was among them.
func (s *supervisor) reap() (serveEnded bool) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 {
			return serveEnded
		}
		if pid == s.serve {
			s.serve, serveEnded = 0, true
			s.log.Warn("serve ended", "status", int(status))
		}
	}
}

// stop ends everything: serve first, which tells the sessions, then SIGHUP, SIGTERM and SIGKILL to all that is left.
func (s *supervisor) stop(signals <-chan os.Signal, grace time.Duration) int {
	end := time.Now().Add(grace)
	if s.serve > 0 {
		_ = syscall.Kill(s.serve, syscall.SIGTERM)
		s.waitUntil(signals, time.Now().Add(grace/hangUpPart), func() bool { return s.serve == 0 })
	}
	steps := []struct {
		signal syscall.Signal
		until  time.Time
	}{
		{syscall.SIGHUP, time.Now().Add(time.Until(end) / hangUpPart)}, {syscall.SIGTERM, end},
	}
	for _, step := range steps {
		_ = syscall.Kill(-1, step.signal) // ESRCH: nothing is left
		_ = syscall.Kill(-1, syscall.SIGCONT)
		if s.waitUntil(signals, step.until, noChildren) {
			return 0
		}
	}
	_ = syscall.Kill(-1, syscall.SIGKILL)
	s.waitUntil(signals, time.Now().Add(time.Second), noChildren)
	return 0
}

func noChildren() bool {
	err := unix.Waitid(unix.P_ALL, 0, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return errors.Is(err, syscall.ECHILD)
}

// waitUntil reaps until done or the time has come.
func (s *supervisor) waitUntil(signals <-chan os.Signal, until time.Time, done func() bool) bool {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	for {
		s.reap()
		if done() {
			return true
		}
		select {
		case <-signals:
		case <-timer.C:
			return false
		}
	}
}
