package rpc

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
	"github.com/carrel-dev/carrel/gen/go/carrel/v1/carrelv1connect"
	"github.com/carrel-dev/carrel/services/auth"
	"github.com/carrel-dev/carrel/services/fleet"
)

// UserStore keeps accounts and projects.
type UserStore interface {
	AddUsers(ctx context.Context, users []fleet.User, partial bool, now time.Time) ([]fleet.UserOutcome, error)
	UserByName(ctx context.Context, name string) (fleet.User, error)
	Users(ctx context.Context, limit int, after string) ([]fleet.User, string, error)
	UpdateUser(ctx context.Context, name string, change func(*fleet.User) error, now time.Time) (fleet.User, error)
	AddSignIn(ctx context.Context, user fleet.UserID, hash []byte, expires, now time.Time) error
	Projects(ctx context.Context) ([]fleet.Project, error)
	CreateProject(ctx context.Context, project fleet.Project, now time.Time) error
}

// Users serves UserService.
type Users struct {
	Store   UserStore
	Streams Streams
	// Changed is told of accounts whose identity or door changed.
	Changed    func(ctx context.Context, user fleet.User)
	Now        func() time.Time
	SignInLife time.Duration
	// SignInLink makes the text that is shown once.
	SignInLink func(code string) string
}

var _ carrelv1connect.UserServiceHandler = (*Users)(nil)

// List returns users by name; a member sees only themselves.
func (u *Users) List(ctx context.Context, req *connect.Request[carrelv1.UserServiceListRequest]) (*connect.Response[carrelv1.UserServiceListResponse], error) {
	actor := actorOf(ctx)
	if !actor.Admin() {
		return connect.NewResponse(&carrelv1.UserServiceListResponse{Users: []*carrelv1.User{userOnWire(actor.User)}}), nil
	}
	limit, err := pageSize(req.Msg.GetPageSize())
	if err != nil {
		return nil, err
	}
	users, next, err := u.Store.Users(ctx, limit, req.Msg.GetPageToken())
	if err != nil {
		return nil, err
	}
	res := &carrelv1.UserServiceListResponse{NextPageToken: next}
	for _, user := range users {
		res.Users = append(res.Users, userOnWire(user))
	}
	return connect.NewResponse(res), nil
}

// Add makes accounts, each with a one-time sign-in.
func (u *Users) Add(ctx context.Context, req *connect.Request[carrelv1.UserServiceAddRequest]) (*connect.Response[carrelv1.UserServiceAddResponse], error) {
	if len(req.Msg.GetUsers()) == 0 {
		return nil, fleet.Errorf(fleet.KindInvalid, "name at least one user")
	}
	asked := make([]fleet.User, 0, len(req.Msg.GetUsers()))
	faults := make([]error, len(req.Msg.GetUsers()))
	for i, wire := range req.Msg.GetUsers() {
		user, err := userFromWire(wire)
		faults[i] = err
		if err != nil && !req.Msg.GetPartial() {
			return nil, err
		}
		if err == nil {
			asked = append(asked, user)
		}
	}
	outcomes, err := u.Store.AddUsers(ctx, asked, req.Msg.GetPartial(), u.Now())
	if err != nil {
		return nil, err
	}
	res := &carrelv1.UserServiceAddResponse{}
	next := 0
	for i, wire := range req.Msg.GetUsers() {
		if faults[i] != nil {
			res.Users = append(res.Users, &carrelv1.AddedUser{User: &carrelv1.User{Name: wire.GetName()}, Error: fleet.UserMessage(faults[i])})
			continue
		}
		added, err := u.outcome(ctx, outcomes[next])
		if err != nil {
			return nil, err
		}
		res.Users = append(res.Users, added)
		next++
	}
	return connect.NewResponse(res), nil
}

func (u *Users) outcome(ctx context.Context, o fleet.UserOutcome) (*carrelv1.AddedUser, error) {
	if o.Err != nil {
		return &carrelv1.AddedUser{User: &carrelv1.User{Name: o.User.Name}, Error: fleet.UserMessage(o.Err)}, nil
	}
	link, _, err := u.signIn(ctx, o.User)
	if err != nil {
		return nil, err
	}
	return &carrelv1.AddedUser{User: userOnWire(o.User), SignIn: link}, nil
}

func (u *Users) signIn(ctx context.Context, user fleet.User) (link string, expires time.Time, err error) {
	code := auth.NewCode()
	expires = u.Now().Add(u.SignInLife)
	if err := u.Store.AddSignIn(ctx, user.ID, code.Hash, expires, u.Now()); err != nil {
		return "", time.Time{}, err
	}
	return u.SignInLink(code.Text), expires, nil
}

// Update changes an account.
func (u *Users) Update(ctx context.Context, req *connect.Request[carrelv1.UserServiceUpdateRequest]) (*connect.Response[carrelv1.UserServiceUpdateResponse], error) {
	wire := req.Msg.GetUser()
	user, err := u.Store.UpdateUser(ctx, wire.GetName(), func(user *fleet.User) error {
		return applyUserFields(user, wire, req.Msg.GetFields())
	}, u.Now())
	if err != nil {
		return nil, err
	}
	if user.Disabled {
		u.Streams.CloseUser(string(user.ID), "the account "+user.Name+" was disabled")
	}
	u.Changed(ctx, user)
	return connect.NewResponse(&carrelv1.UserServiceUpdateResponse{User: userOnWire(user)}), nil
}

func applyUserFields(user *fleet.User, wire *carrelv1.User, fields []string) error {
	if len(fields) == 0 {
		return fleet.Errorf(fleet.KindInvalid, "name at least one field to change")
	}
	for _, field := range fields {
		switch field {
		case "login":
			user.Login = wire.GetLogin()
		case "uid":
			user.UID = wire.GetUid()
		case "gid":
			user.GID = wire.GetGid()
		case "groups":
			groups, err := groupsFromWire(wire.GetGroups())
			if err != nil {
				return err
			}
			user.Groups = groups
		case "role":
			user.Role = roleFromWire(wire.GetRole())
		case "project":
			user.Project = wire.GetProject()
		case "gpu_limit":
			user.GPULimit = limitFromWire(wire.GpuLimit)
		case "disabled":
			user.Disabled = wire.GetDisabled()
		default:
			return fleet.Errorf(fleet.KindInvalid, "%q cannot be changed; login, uid, gid, groups, role, project, gpu_limit and disabled can", field)
		}
	}
	return nil
}

// CreateSignIn makes another one-time sign-in.
func (u *Users) CreateSignIn(ctx context.Context, req *connect.Request[carrelv1.CreateSignInRequest]) (*connect.Response[carrelv1.CreateSignInResponse], error) {
	user, err := u.Store.UserByName(ctx, req.Msg.GetUser())
	if err != nil {
		return nil, err
	}
	if user.Disabled {
		return nil, fleet.Errorf(fleet.KindConflict, "%s is disabled; run `carrel user enable %s` first", user.Name, user.Name)
	}
	link, expires, err := u.signIn(ctx, user)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.CreateSignInResponse{SignIn: link, ExpiresAt: stamp(expires)}), nil
}

// ListProjects returns projects by name; a member sees their own.
func (u *Users) ListProjects(ctx context.Context, _ *connect.Request[carrelv1.ListProjectsRequest]) (*connect.Response[carrelv1.ListProjectsResponse], error) {
	projects, err := u.Store.Projects(ctx)
	if err != nil {
		return nil, err
	}
	actor := actorOf(ctx)
	res := &carrelv1.ListProjectsResponse{}
	for _, p := range projects {
		if actor.Admin() {
			res.Projects = append(res.Projects, &carrelv1.Project{Name: p.Name, Description: p.Description, Members: p.Members})
		} else if slices.Contains(p.Members, actor.User.Name) {
			res.Projects = append(res.Projects, &carrelv1.Project{Name: p.Name, Description: p.Description})
		}
	}
	return connect.NewResponse(res), nil
}

// CreateProject makes a project.
func (u *Users) CreateProject(ctx context.Context, req *connect.Request[carrelv1.CreateProjectRequest]) (*connect.Response[carrelv1.CreateProjectResponse], error) {
	wire := req.Msg.GetProject()
	if err := fleet.CheckName("project", wire.GetName()); err != nil {
		return nil, err
	}
	p := fleet.Project{Name: wire.GetName(), Description: wire.GetDescription(), Members: wire.GetMembers()}
	if err := u.Store.CreateProject(ctx, p, u.Now()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&carrelv1.CreateProjectResponse{Project: &carrelv1.Project{Name: p.Name, Description: p.Description, Members: p.Members}}), nil
}

func userOnWire(u fleet.User) *carrelv1.User {
	out := &carrelv1.User{
		Name: u.Name, Login: u.Login, Uid: u.UID, Gid: u.GID, Role: carrelv1.Role_ROLE_MEMBER, Project: u.Project,
		Disabled: u.Disabled, CreatedAt: stamp(u.CreatedAt),
	}
	if u.Role == fleet.RoleAdmin {
		out.Role = carrelv1.Role_ROLE_ADMIN
	}
	if u.GPULimit != nil {
		n := int32(*u.GPULimit)
		out.GpuLimit = &n
	}
	for _, g := range u.Groups {
		out.Groups = append(out.Groups, fmt.Sprintf("%s:%d", g.Name, g.GID))
	}
	return out
}

func userFromWire(w *carrelv1.User) (fleet.User, error) {
	groups, err := groupsFromWire(w.GetGroups())
	if err != nil {
		return fleet.User{}, err
	}
	return fleet.User{
		Name: w.GetName(), Login: w.GetLogin(), UID: w.GetUid(), GID: w.GetGid(), Groups: groups, Role: roleFromWire(w.GetRole()),
		Project: w.GetProject(), GPULimit: limitFromWire(w.GpuLimit),
	}, nil
}

func roleFromWire(r carrelv1.Role) fleet.Role {
	if r == carrelv1.Role_ROLE_ADMIN {
		return fleet.RoleAdmin
	}
	return fleet.RoleMember
}

// limitFromWire converts a limit; absent or negative means the deployment's.
func limitFromWire(n *int32) *int {
	if n == nil || *n < 0 {
		return nil
	}
	limit := int(*n)
	return &limit
}

func groupsFromWire(list []string) ([]fleet.Group, error) {
	groups := make([]fleet.Group, 0, len(list))
	for _, text := range list {
		name, number, ok := strings.Cut(text, ":")
		gid, err := strconv.ParseInt(number, 10, 32)
		if !ok || err != nil || gid < fleet.LowestUID || fleet.CheckLogin(name) != nil {
			return nil, fleet.Errorf(fleet.KindInvalid, "group %q must be NAME:GID with a gid of %d or more", text, fleet.LowestUID)
		}
		groups = append(groups, fleet.Group{Name: name, GID: gid})
	}
	return groups, nil
}
