// Package control is the conversation between carrel-init's serve role and one session process, over a unix socket pair.
//
// Each side sends frames, a length of 4 bytes and a JSON value; exactly one field of a message is set. The rendezvous (Summon, Receive) is how
// a session gets a new socket pair to serve after serve was restarted: both hold an end of a datagram socket pair that the init
// role made and keeps open, so that no path exists at which anyone else could ask for a signature.
package control

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// ToSession is what serve says. The first message to a new session is a Setup.
type ToSession struct {
	Setup  *Setup   `json:"setup,omitempty"`
	Keys   *Keys    `json:"keys,omitempty"`
	Signed *Signed  `json:"signed,omitempty"`
	Stop   *Goodbye `json:"stop,omitempty"`
}

// Setup is all that a session process needs to know. Keys are in SSH wire form.
type Setup struct {
	ID          string   `json:"id"`
	Login       string   `json:"login"`
	UID         int      `json:"uid"`
	GID         int      `json:"gid"`
	Home        string   `json:"home"`
	Env         []string `json:"env"`
	HostKey     []byte   `json:"host_key"`
	Certificate []byte   `json:"certificate,omitempty"`
	Keys        [][]byte `json:"keys"`
	RuntimeDir  string   `json:"runtime_dir"`
}

// Keys replaces the keys that may log in.
type Keys struct {
	Keys [][]byte `json:"keys"`
}

// Signed answers a Sign of the same ID. Err is set when there is no signature.
type Signed struct {
	ID     uint64 `json:"id"`
	Format string `json:"format"`
	Blob   []byte `json:"blob"`
	Err    string `json:"err,omitempty"`
}

// Goodbye ends the session; Reason is shown to the user.
type Goodbye struct {
	Reason string `json:"reason"`
}

// ToServe is what a session says.
type ToServe struct {
	Hello *Hello `json:"hello,omitempty"`
	Sign  *Sign  `json:"sign,omitempty"`
	Login *Login `json:"login,omitempty"`
	Typed bool   `json:"typed,omitempty"`
}

// Hello is the first message on a socket pair that came by the rendezvous: which session it is, and who is logged in on it.
type Hello struct {
	ID    string `json:"id"`
	Login *Login `json:"login,omitempty"`
}

// Sign asks for a signature with the host key over Data, in the given SSH signature algorithm (empty: the key's default).
type Sign struct {
	ID        uint64 `json:"id"`
	Data      []byte `json:"data"`
	Algorithm string `json:"algorithm,omitempty"`
}

// Login says whose key signed the handshake.
type Login struct {
	Fingerprint string `json:"fingerprint"`
}

// writeTimeout bounds one Send: a peer that does not read is broken, and must not hold up the other sessions.
const writeTimeout = 5 * time.Second

// MaxMessage is the longest message in bytes that is read.
const MaxMessage = 4 << 20

// Conn carries messages. Send is safe for concurrent use, Receive for one goroutine.
type Conn struct {
	conn net.Conn
	mu   sync.Mutex // one frame at a time
}

// NewConn takes conn over.
func NewConn(conn net.Conn) *Conn {
	return &Conn{conn: conn}
}

// FileConn makes a Conn of an inherited or received descriptor and closes f.
func FileConn(f *os.File) (*Conn, error) {
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("control socket: %w", err)
	}
	return NewConn(conn), nil
}

// Send writes one message.
func (c *Conn) Send(msg any) error {
	data, err := json.Marshal(msg)
	if err != nil {
		return fmt.Errorf("encode control message: %w", err)
	}
	if len(data) > MaxMessage {
		return fmt.Errorf("control message of %d bytes: the most is %d", len(data), MaxMessage)
	}
	frame := append(binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(data)), uint32(len(data))), data...)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.conn.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err = c.conn.Write(frame)
	return err
}

// Receive reads one message into msg. One that is longer than MaxMessage ends the conversation.
func (c *Conn) Receive(msg any) error {
	var head [4]byte
	if _, err := io.ReadFull(c.conn, head[:]); err != nil {
		return err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size > MaxMessage {
		return fmt.Errorf("control message of %d bytes: the most is %d", size, MaxMessage)
	}
	data := make([]byte, size)
	if _, err := io.ReadFull(c.conn, data); err != nil {
		return err
	}
	return json.Unmarshal(data, msg)
}

// Close ends the conversation.
func (c *Conn) Close() error { return c.conn.Close() }

// Pair makes a connected pair of stream sockets.
func Pair() (a, b *os.File, err error) { return pair(unix.SOCK_STREAM) }

// Rendezvous makes the pair for Receive (serve's end) and Summon (the sessions' end).
func Rendezvous() (serve, sessions *os.File, err error) {
	serve, sessions, err = pair(unix.SOCK_SEQPACKET)
	if err != nil {
		return nil, nil, err
	}
	if err := unix.SetsockoptInt(int(serve.Fd()), unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		serve.Close()
		sessions.Close()
		return nil, nil, fmt.Errorf("rendezvous: pass credentials: %w", err)
	}
	return serve, sessions, nil
}

func pair(kind int) (a, b *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "control"), os.NewFile(uintptr(fds[1]), "control"), nil
}

// ErrBusy says that the rendezvous holds as many requests as it can; try again later.
var ErrBusy = errors.New("rendezvous is full")

// Summon sends one end of a new pair to whichever serve process is, or comes to be, at the other end, and returns the other.
// It never waits.
func Summon(sessions int) (*Conn, error) {
	ours, theirs, err := Pair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	err = unix.Sendmsg(sessions, []byte{1}, unix.UnixRights(int(theirs.Fd())), nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil {
		ours.Close()
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ETOOMANYREFS) {
			return nil, ErrBusy
		}
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	return FileConn(ours)
}

// Caller is a session that came by the rendezvous, with its process as the kernel names it.
type Caller struct {
	Conn *Conn
	PID  int
	UID  int
}

// Receive waits for the next Summon. One that is not as Summon sends it gives ErrBadSummon, and the next may be received.
func Receive(serve *net.UnixConn) (Caller, error) {
	body, oob := make([]byte, 16), make([]byte, 256)
	_, n, _, _, err := serve.ReadMsgUnix(body, oob)
	if err != nil {
		return Caller{}, fmt.Errorf("rendezvous: %w", err)
	}
	messages, err := unix.ParseSocketControlMessage(oob[:n])
	if err != nil {
		return Caller{}, fmt.Errorf("%w: %w", ErrBadSummon, err)
	}
	var c Caller
	var files []*os.File
	for _, m := range messages {
		if cred, err := unix.ParseUnixCredentials(&m); err == nil {
			c.PID, c.UID = int(cred.Pid), int(cred.Uid)
		}
		if fds, err := unix.ParseUnixRights(&m); err == nil {
			for _, fd := range fds {
				unix.CloseOnExec(fd)
				files = append(files, os.NewFile(uintptr(fd), "control"))
			}
		}
	}
	if len(files) != 1 || c.PID <= 0 {
		for _, f := range files {
			f.Close()
		}
		return Caller{}, ErrBadSummon
	}
	if c.Conn, err = FileConn(files[0]); err != nil {
		return Caller{}, fmt.Errorf("%w: %w", ErrBadSummon, err)
	}
	return c, nil
}

// ErrBadSummon says that a rendezvous message was not one of Summon's.
var ErrBadSummon = errors.New("malformed rendezvous message")
