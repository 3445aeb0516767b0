package command

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/carrel-dev/carrel/cli/output"
	carrelv1 "github.com/carrel-dev/carrel/gen/go/carrel/v1"
)

type userView struct {
	Name      string   `json:"name"`
	Login     string   `json:"login"`
	UID       int64    `json:"uid"`
	GID       int64    `json:"gid"`
	Groups    []string `json:"groups"`
	Role      string   `json:"role"`
	Project   string   `json:"project"`
	GPULimit  *int32   `json:"gpu_limit,omitempty"`
	Disabled  bool     `json:"disabled"`
	CreatedAt *moment  `json:"created_at"`
}

func viewUser(u *carrelv1.User) userView {
	return userView{
		Name: u.GetName(), Login: u.GetLogin(), UID: u.GetUid(), GID: u.GetGid(), Groups: emptyIfNil(u.GetGroups()), Role: word(u.GetRole()),
		Project: u.GetProject(), GPULimit: u.GpuLimit, Disabled: u.GetDisabled(), CreatedAt: momentOf(u.GetCreatedAt()),
	}
}

func (u userView) limitText() string {
	if u.GPULimit == nil {
		return "-"
	}
	return fmt.Sprint(*u.GPULimit)
}

func newUser(a *app) *cobra.Command {
	return group("user", "Accounts (admins)",
		newUserList(a), newUserAdd(a), newUserSet(a), newUserDisable(a, "disable", true), newUserDisable(a, "enable", false), newUserImport(a), newUserSignIn(a))
}

func newUserList(a *app) *cobra.Command {
	o := listFlags{}
	cmd := &cobra.Command{
		Use: "ls", Short: "List accounts", Args: exactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.early(o); err != nil {
				return err
			}
			api, err := a.connect()
			if err != nil {
				return err
			}
			all, err := allPages(func(token string) ([]*carrelv1.User, string, error) {
				resp, err := api.users.List(cmd.Context(), connect.NewRequest(&carrelv1.UserServiceListRequest{PageSize: pageSize, PageToken: token}))
				if err != nil {
					return nil, "", err
				}
				return resp.Msg.GetUsers(), resp.Msg.GetNextPageToken(), nil
			})
			if err != nil {
				return err
			}
			return writeList(a, userList(), each(all, viewUser), o)
		},
	}
	a.listFlags(cmd, &o)
	return cmd
}

func userList() output.List[userView] {
	type col = output.Column[userView]
	return output.List[userView]{
		Columns: []col{
			{Name: "name", Title: "NAME", Text: func(u userView) string { return u.Name }},
			{Name: "login", Title: "LOGIN", Text: func(u userView) string { return u.Login }},
			{Name: "uid", Title: "UID", Right: true, Text: func(u userView) string { return fmt.Sprint(u.UID) }},
			{Name: "gid", Title: "GID", Right: true, Text: func(u userView) string { return fmt.Sprint(u.GID) }},
			{Name: "groups", Title: "GROUPS", Text: func(u userView) string { return orDash(strings.Join(u.Groups, " ")) }, Value: func(u userView) string { return strings.Join(u.Groups, " ") }},
			{Name: "role", Title: "ROLE", Text: func(u userView) string { return u.Role }},
			{Name: "project", Title: "PROJECT", Text: func(u userView) string { return u.Project }},
			{Name: "gpu_limit", Title: "GPU LIMIT", Right: true, Text: userView.limitText, Value: func(u userView) string {
				if u.GPULimit == nil {
					return ""
				}
				return fmt.Sprint(*u.GPULimit)
			}},
			{Name: "disabled", Title: "STATE", Text: func(u userView) string {
				if u.Disabled {
					return "disabled"
				}
				return "ok"
			}, Value: func(u userView) string { return fmt.Sprint(u.Disabled) }},
			{Name: "created_at", Text: func(u userView) string { return u.CreatedAt.text() }},
		},
		ID:    func(u userView) string { return u.Name },
		Empty: "no accounts",
	}
}

// userFlags are the flags of `user add` and `user set`, and the columns of `user import`.
type userFlags struct {
	login, uid, gid, role, project, gpuLimit string
	groups                                   []string
}

func (f *userFlags) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.StringVar(&f.login, "login", "", "POSIX login inside workspaces (default: the name)")
	fl.StringVar(&f.uid, "uid", "", "numeric user id, 1000 or more (default: the next free one)")
	fl.StringVar(&f.gid, "gid", "", "numeric group id (default: the uid)")
	fl.StringArrayVar(&f.groups, "group", nil, "`NAME:GID`, another group; may be given many times")
	fl.StringVar(&f.role, "role", "", "`member` or admin")
	fl.StringVar(&f.project, "project", "", "project that is billed when none is named")
	fl.StringVar(&f.gpuLimit, "gpu-limit", "", "most GPUs at once; `default`: the deployment's limit")
}

// user returns the account, and the names of the fields that were given; all faults are told together.
func (f userFlags) user(name string) (*carrelv1.User, []string, error) {
	u := &carrelv1.User{Name: name, Login: f.login, Project: f.project, Groups: f.groups}
	var fields, faults []string
	take := func(field, value string, read func() error) {
		if value == "" {
			return
		}
		fields = append(fields, field)
		if err := read(); err != nil {
			faults = append(faults, err.Error())
		}
	}
	none := func() error { return nil }
	take("login", f.login, none)
	take("uid", f.uid, func() (err error) { u.Uid, err = parseID("uid", f.uid); return })
	take("gid", f.gid, func() (err error) { u.Gid, err = parseID("gid", f.gid); return })
	take("groups", strings.Join(f.groups, " "), func() error { return checkGroups(f.groups) })
	take("role", f.role, func() (err error) { u.Role, err = parseRole(f.role); return })
	take("project", f.project, none)
	take("gpu_limit", f.gpuLimit, func() (err error) { u.GpuLimit, err = parseLimit(f.gpuLimit); return })
	if len(faults) > 0 {
		return nil, nil, usagef("%s", strings.Join(faults, "; "))
	}
	return u, fields, nil
}

func parseID(what, s string) (int64, error) {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil || n < 1 {
		return 0, fmt.Errorf("%s %q: use a number; a person's is 1000 or more", what, s)
	}
	if what == "uid" && n < 1000 {
		return 0, fmt.Errorf("uid %d: below 1000 are the system's own accounts; use 1000 or more", n)
	}
	return n, nil
}

func checkGroups(groups []string) error {
	for _, g := range groups {
		name, gid, ok := strings.Cut(g, ":")
		if n, err := strconv.ParseInt(gid, 10, 32); !ok || name == "" || err != nil || n < 1 {
			return fmt.Errorf("group %q: use NAME:GID, such as vision:20010", g)
		}
	}
	return nil
}

func parseRole(s string) (carrelv1.Role, error) {
	switch s {
	case "member":
		return carrelv1.Role_ROLE_MEMBER, nil
	case "admin":
		return carrelv1.Role_ROLE_ADMIN, nil
	}
	return 0, fmt.Errorf("role %q: use member or admin", s)
}

func parseLimit(s string) (*int32, error) {
	if s == "default" {
		return nil, nil
	}
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil || n < 0 || n > 1_000_000 {
		return nil, fmt.Errorf("gpu limit %q: use a number of 0 or more, or `default`", s)
	}
	limit := int32(n)
	return &limit, nil
}

// addedView is the outcome for one account in `user add` and `user import`.
type addedView struct {
	Name   string `json:"name"`
	SignIn string `json:"sign_in,omitempty"`
	Error  string `json:"error,omitempty"`
}

func newUserAdd(a *app) *cobra.Command {
	f := userFlags{}
	var format string
	cmd := &cobra.Command{
		Use: "add NAME", Short: "Make an account and print its one-time sign-in", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			u, _, err := f.user(args[0])
			if err != nil {
				return err
			}
			added, err := a.addUsers(cmd.Context(), []*carrelv1.User{u}, false)
			if err != nil {
				return err
			}
			v := added[0]
			if v.Error != "" {
				return failf(exitUsage, "%s", v.Error)
			}
			a.say("made %s; they sign in once with:", v.Name)
			if f, err := a.format(format); err != nil || f == output.JSON {
				return firstError(err, output.WriteJSON(a.sys.Out, v))
			}
			return a.print("carrel login '%s'", v.SignIn)
		},
	}
	f.register(cmd)
	a.formatFlag(cmd, &format)
	return cmd
}

func (a *app) addUsers(ctx context.Context, users []*carrelv1.User, partial bool) ([]addedView, error) {
	api, err := a.connect()
	if err != nil {
		return nil, err
	}
	resp, err := api.users.Add(ctx, connect.NewRequest(&carrelv1.UserServiceAddRequest{RequestId: requestID(), Users: users, Partial: partial}))
	if err != nil {
		return nil, err
	}
	if len(resp.Msg.GetUsers()) != len(users) {
		return nil, failf(exitFailure, "the gateway answered for %d of %d accounts", len(resp.Msg.GetUsers()), len(users))
	}
	return each(resp.Msg.GetUsers(), func(u *carrelv1.AddedUser) addedView {
		return addedView{u.GetUser().GetName(), u.GetSignIn(), u.GetError()}
	}), nil
}

func newUserSet(a *app) *cobra.Command {
	f := userFlags{}
	var noGroups bool
	cmd := &cobra.Command{
		Use: "set NAME", Short: "Change an account", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			u, fields, err := f.user(args[0])
			if err != nil {
				return err
			}
			if noGroups && len(f.groups) > 0 {
				return usagef("--group and --no-groups exclude each other")
			}
			if noGroups {
				u.Groups, fields = nil, append(fields, "groups")
			}
			if len(fields) == 0 {
				return usagef("carrel user set: say what to change; see `carrel user set --help`")
			}
			return a.updateUser(cmd.Context(), u, fields, "changed "+strings.Join(fields, ", "))
		},
	}
	f.register(cmd)
	cmd.Flags().BoolVar(&noGroups, "no-groups", false, "no other groups")
	return cmd
}

func (a *app) updateUser(ctx context.Context, u *carrelv1.User, fields []string, done string) error {
	api, err := a.connect()
	if err != nil {
		return err
	}
	if _, err := api.users.Update(ctx, connect.NewRequest(&carrelv1.UserServiceUpdateRequest{User: u, Fields: fields})); err != nil {
		return err
	}
	return a.print("%s: %s", u.GetName(), done)
}

func newUserDisable(a *app, verb string, disabled bool) *cobra.Command {
	short, done := "Open the doors of an account again", "enabled"
	if disabled {
		short, done = "Shut every door of an account; open connections are cut, workspaces and files stay", "disabled"
	}
	return &cobra.Command{
		Use: verb + " NAME", Short: short, Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.updateUser(cmd.Context(), &carrelv1.User{Name: args[0], Disabled: disabled}, []string{"disabled"}, done)
		},
	}
}

func newUserSignIn(a *app) *cobra.Command {
	return &cobra.Command{
		Use: "sign-in NAME", Short: "Make another one-time sign-in, for a second laptop", Args: exactArgs("NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			api, err := a.connect()
			if err != nil {
				return err
			}
			resp, err := api.users.CreateSignIn(cmd.Context(), connect.NewRequest(&carrelv1.CreateSignInRequest{User: args[0]}))
			if err != nil {
				return err
			}
			a.say("good once, until %s:", momentOf(resp.Msg.GetExpiresAt()).stamp())
			return a.print("carrel login '%s'", resp.Msg.GetSignIn())
		},
	}
}
