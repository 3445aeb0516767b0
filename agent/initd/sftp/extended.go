package sftp

import (
	"encoding/binary"
	"errors"
	"strings"

	"golang.org/x/sys/unix"
)

type extension struct {
	name, version string
	act           func(*Server, uint32, *reader) error
}

// extensions are offered in the version packet; names and layouts are those of OpenSSH's PROTOCOL file, section 4.
func extensions() []extension {
	return []extension{
		{"posix-rename@openssh.com", "1", (*Server).posixRename},
		{"statvfs@openssh.com", "2", (*Server).statvfs},
		{"fstatvfs@openssh.com", "2", (*Server).fstatvfs},
		{"hardlink@openssh.com", "1", (*Server).hardlink},
		{"fsync@openssh.com", "1", (*Server).fsync},
		{"lsetstat@openssh.com", "1", (*Server).lsetstat},
		{"limits@openssh.com", "1", (*Server).limits},
		{"expand-path@openssh.com", "1", (*Server).expandPath},
		{"users-groups-by-id@openssh.com", "1", (*Server).usersGroups},
	}
}

func (s *Server) extended(id uint32, req *reader) error {
	name := req.string()
	for _, e := range extensions() {
		if e.name == name {
			return e.act(s, id, req)
		}
	}
	return errUnsupported
}

func (s *Server) posixRename(id uint32, req *reader) error {
	from, to := s.path(req.string()), s.path(req.string())
	if req.bad {
		return nil
	}
	return s.applied(id, unix.Rename(from, to))
}

func (s *Server) hardlink(id uint32, req *reader) error {
	from, to := s.path(req.string()), s.path(req.string())
	if req.bad {
		return nil
	}
	return s.applied(id, unix.Link(from, to))
}

func (s *Server) fsync(id uint32, req *reader) error {
	h, err := s.file(req)
	if err != nil {
		return err
	}
	return s.applied(id, unix.Fsync(h.fd))
}

func (s *Server) statvfs(id uint32, req *reader) error {
	path := s.path(req.string())
	if req.bad {
		return nil
	}
	return s.replyStatvfs(id, func(st *unix.Statfs_t) error { return unix.Statfs(path, st) })
}

func (s *Server) fstatvfs(id uint32, req *reader) error {
	h, err := s.file(req)
	if err != nil {
		return err
	}
	return s.replyStatvfs(id, func(st *unix.Statfs_t) error { return unix.Fstatfs(h.fd, st) })
}

func (s *Server) replyStatvfs(id uint32, statfs func(*unix.Statfs_t) error) error {
	var st unix.Statfs_t
	if err := statfs(&st); err != nil {
		return err
	}
	flags := uint64(0)
	if st.Flags&unix.ST_RDONLY != 0 {
		flags |= 1
	}
	if st.Flags&unix.ST_NOSUID != 0 {
		flags |= 2
	}
	fsid := uint64(uint32(st.Fsid.Val[0])) | uint64(uint32(st.Fsid.Val[1]))<<32
	frsize := uint64(st.Frsize)
	if frsize == 0 {
		frsize = uint64(st.Bsize)
	}
	s.begin(typeExtReply, id)
	for _, v := range [...]uint64{
		uint64(st.Bsize), frsize, st.Blocks, st.Bfree, st.Bavail,
		st.Files, st.Ffree, st.Ffree, fsid, flags, uint64(st.Namelen),
	} {
		s.reply = binary.BigEndian.AppendUint64(s.reply, v)
	}
	return nil
}

func (s *Server) lsetstat(id uint32, req *reader) error {
	path, a := s.path(req.string()), req.attrs()
	if req.bad {
		return nil
	}
	return s.applied(id, setAttrs(path, a, unix.AT_SYMLINK_NOFOLLOW))
}

// limits tells the most bytes of a packet, a read and a write, and the most handles.
func (s *Server) limits(id uint32, _ *reader) error {
	s.begin(typeExtReply, id)
	for _, v := range [...]uint64{maxPacket, maxData, maxData, maxHandles} {
		s.reply = binary.BigEndian.AppendUint64(s.reply, v)
	}
	return nil
}

var errOtherHome = errors.New("only your own home (~) can be expanded")

// expandPath makes "~/x" a path in the home. Another user's home is refused: a workspace has one.
func (s *Server) expandPath(id uint32, req *reader) error {
	p := req.string()
	switch {
	case p == "~":
		p = s.dir
	case strings.HasPrefix(p, "~/"):
		p = s.dir + p[1:]
	case strings.HasPrefix(p, "~"):
		return errOtherHome
	}
	real, err := resolve(s.path(p))
	if err != nil {
		return err
	}
	return s.replyName(id, real)
}

// usersGroups answers names for lists of uids and gids; one without a name gets an empty string.
func (s *Server) usersGroups(id uint32, req *reader) error {
	uids, gids := req.bytes(), req.bytes()
	if req.bad {
		return nil
	}
	s.begin(typeExtReply, id)
	s.reply = appendString(s.reply, string(namesFor(uids, s.names.user)))
	s.reply = appendString(s.reply, string(namesFor(gids, s.names.group)))
	return nil
}

func namesFor(ids []byte, name func(uint32) (string, bool)) []byte {
	var out []byte
	for ; len(ids) >= 4; ids = ids[4:] {
		n, _ := name(binary.BigEndian.Uint32(ids))
		out = appendString(out, n)
	}
	return out
}
