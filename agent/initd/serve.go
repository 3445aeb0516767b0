package initd

import (
	"context"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// serveMain is the serve role: the agent's link, the host key, and the sessions.
func serveMain(args []string, log *slog.Logger) int {
	flags := flag.NewFlagSet("serve", flag.ContinueOnError)
	address := flags.String("link", DefaultLink, "the agent's address, as KIND:ADDRESS")
	if err := flags.Parse(args); err != nil {
		return exitUsage
	}
	// The host key is in this process: not even root of the workspace may look into it, which never has CAP_SYS_PTRACE.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		log.Error("hide memory", "err", err)
		return exitFailed
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	surviveBrokenLog()
	s, err := newServe(*address, log)
	if err != nil {
		log.Error("start", "err", err)
		return exitFailed
	}
	if err := s.run(ctx); err != nil {
		log.Error("ended", "err", err)
		return exitFailed
	}
	return 0
}

// serve is the serve role's state.
type serve struct {
	log      *slog.Logger
	link     address
	receive  *net.UnixConn
	orders   *os.File
	host     *host
	sessions *sessions
	streams  sync.WaitGroup // connections that were dialled back
}

func newServe(link string, log *slog.Logger) (*serve, error) {
	to, err := parseAddress(link)
	if err != nil {
		return nil, err
	}
	env, err := readEnviron(fdEnviron)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(fdReceive, "rendezvous")
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	file.Close()
	for _, fd := range []int{fdEnviron, fdSummon, fdOrders} {
		unix.CloseOnExec(fd)
	}
	h := newHost(env)
	return &serve{
		log: log, link: to, receive: conn.(*net.UnixConn), orders: os.NewFile(fdOrders, "orders"),
		host: h, sessions: newSessions(h, fdSummon, log),
	}, nil
}

// readEnviron reads the image's environment from the file in memory, at offset 0 each time.
func readEnviron(fd int) ([]string, error) {
	data, err := io.ReadAll(io.NewSectionReader(fdReader(fd), 0, 1<<30))
	if err != nil {
		return nil, fmt.Errorf("read the image's environment: %w", err)
	}
	if len(data) == 0 {
		return nil, nil
	}
	return strings.Split(string(data), "\x00"), nil
}

type fdReader int

func (fd fdReader) ReadAt(b []byte, off int64) (int, error) {
	n, err := unix.Pread(int(fd), b, off)
	if n == 0 && err == nil {
		err = io.EOF
	}
	return n, err
}

// run serves until ctx ends; then the sessions are told, and it returns when they have ended or a second has passed.
func (s *serve) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return s.keepLink(ctx) })
	g.Go(func() error { return s.sessions.receive(ctx, s.receive) })
	g.Go(func() error { return s.sessions.sweep(ctx) })
	<-ctx.Done()
	s.sessions.stop(s.host.stopReason(), stopWait)
	err := g.Wait()
	s.streams.Wait()
	return err
}

// stopWait is the time that sessions have to say goodbye when serve is told to stop.
const stopWait = time.Second

// orderStop asks the init role to end everything within grace.
func (s *serve) orderStop(grace time.Duration) error {
	_, err := io.WriteString(s.orders, grace.String()+"\n")
	return err
}

// surviveBrokenLog keeps a process alive whose standard error nobody reads any more. Not by ignoring SIGPIPE, which the user's
// programs would inherit.
func surviveBrokenLog() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) }
