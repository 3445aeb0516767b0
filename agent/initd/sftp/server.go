// Package sftp is the SFTP version 3 server that a session runs over one SSH channel.
//
// It works through requests one after another, as OpenSSH's sftp-server does, with the rights of the process that calls it:
// there is no virtual root. The wire format is draft-ietf-secsh-filexfer-02 with OpenSSH's extensions (PROTOCOL, section 4).
package sftp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"path/filepath"
)

// Sizes in bytes. maxPacket is OpenSSH's SFTP_MAX_MSG_LENGTH; a read or write leaves 1 KiB of it for the header.
const (
	maxPacket  = 256 << 10
	maxData    = maxPacket - 1024
	maxHandles = 1024
)

// Server answers the requests of one SFTP channel. It is not safe for concurrent use.
type Server struct {
	dir     string
	in      *bufio.Reader
	out     *bufio.Writer
	packet  []byte
	reply   []byte
	handles map[uint32]*handle
	next    uint32
	names   names
}

// New makes a server over rw whose relative paths start at dir, an absolute path.
func New(rw io.ReadWriter, dir string) *Server {
	return &Server{
		dir:     dir,
		in:      bufio.NewReaderSize(rw, 64<<10),
		out:     bufio.NewWriterSize(rw, 64<<10),
		handles: make(map[uint32]*handle),
	}
}

// Serve answers until the client ends its side, which gives nil. A packet that breaks the protocol ends it with an error.
// Every handle the client left open is closed on return.
func (s *Server) Serve() error {
	defer s.closeAll()
	for {
		if err := s.flushIfIdle(); err != nil {
			return fmt.Errorf("sftp: send reply: %w", err)
		}
		body, err := s.readPacket()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("sftp: read request: %w", err)
		}
		if err := s.dispatch(body); err != nil {
			return err
		}
		if err := s.send(); err != nil {
			return fmt.Errorf("sftp: send reply: %w", err)
		}
	}
}

// flushIfIdle sends what is gathered unless the next request is already here in full.
func (s *Server) flushIfIdle() error {
	if s.in.Buffered() >= 4 {
		head, err := s.in.Peek(4)
		if err == nil && s.in.Buffered() >= 4+int(min(binary.BigEndian.Uint32(head), maxPacket)) {
			return nil
		}
	}
	return s.out.Flush()
}

func (s *Server) readPacket() ([]byte, error) {
	var head [4]byte
	if _, err := io.ReadFull(s.in, head[:]); err != nil {
		return nil, err
	}
	size := binary.BigEndian.Uint32(head[:])
	if size == 0 || size > maxPacket {
		return nil, fmt.Errorf("packet of %d bytes: the most is %d", size, maxPacket)
	}
	if cap(s.packet) < int(size) {
		s.packet = make([]byte, size)
	}
	body := s.packet[:size]
	if _, err := io.ReadFull(s.in, body); err != nil {
		return nil, fmt.Errorf("packet cut short: %w", io.ErrUnexpectedEOF)
	}
	return body, nil
}

// dispatch puts the reply to one request into s.reply.
func (s *Server) dispatch(body []byte) error {
	kind, req := body[0], &reader{rest: body[1:]}
	if kind == typeInit {
		s.version()
		return nil
	}
	id := req.uint32()
	act := action(kind)
	if act == nil {
		s.status(id, statusUnsupported, "operation unsupported")
		return nil
	}
	err := act(s, id, req)
	if req.bad {
		return fmt.Errorf("sftp: request of type %d is malformed", kind)
	}
	if err != nil {
		code, text := statusOf(err)
		s.status(id, code, text)
	}
	return nil
}

// send frames s.reply. The first four bytes of s.reply are kept free for the length.
func (s *Server) send() error {
	binary.BigEndian.PutUint32(s.reply, uint32(len(s.reply)-4))
	_, err := s.out.Write(s.reply)
	return err
}

func (s *Server) begin(kind byte, id uint32) {
	s.reply = append(s.reply[:0], 0, 0, 0, 0, kind)
	s.reply = binary.BigEndian.AppendUint32(s.reply, id)
}

func (s *Server) version() {
	s.begin(typeVersion, 3)
	for _, e := range extensions() {
		s.reply = appendString(s.reply, e.name)
		s.reply = appendString(s.reply, e.version)
	}
}

func (s *Server) status(id, code uint32, text string) {
	s.begin(typeStatus, id)
	s.reply = binary.BigEndian.AppendUint32(s.reply, code)
	s.reply = appendString(s.reply, text)
	s.reply = appendString(s.reply, "en")
}

func (s *Server) ok(id uint32) error {
	s.status(id, statusOK, "")
	return nil
}

// path makes a request's path absolute: relative ones start at the home.
func (s *Server) path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	if p == "" {
		return s.dir
	}
	return s.dir + "/" + p
}
